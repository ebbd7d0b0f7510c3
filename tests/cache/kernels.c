/* A write and a gather kernel over (blocks, heads, tokens, width), once for each way to compute an index.
   Compiled with -fwrapv, so that signed indexes wrap around as a device's do. */
#include <stdint.h>
#include <string.h>

#define INDEX(T, UNIT)                                                                                   \
    T index = (T)((T)block * (T)((T)heads * (T)tokens * (T)width * (T)(UNIT)));                          \
    index = (T)(index + (T)((T)head * (T)tokens * (T)width * (T)(UNIT)) + (T)((T)token * (T)width * (T)(UNIT)))

#define PAIR(NAME, T, UNIT)                                                                              \
    void write_##NAME(char *pool, int64_t block, int heads, int tokens, int width, int itemsize,         \
                      int token, const char *data) {                                                     \
        for (int head = 0; head < heads; head++) {                                                       \
            INDEX(T, UNIT);                                                                              \
            memcpy(pool + (int64_t)index * (itemsize / (UNIT)), data + (int64_t)head * width * itemsize, \
                   (size_t)width * itemsize);                                                            \
        }                                                                                                \
    }                                                                                                    \
    void gather_##NAME(const char *pool, int64_t block, int heads, int tokens, int width, int itemsize,  \
                       int token, char *data) {                                                          \
        for (int head = 0; head < heads; head++) {                                                       \
            INDEX(T, UNIT);                                                                              \
            memcpy(data + (int64_t)head * width * itemsize, pool + (int64_t)index * (itemsize / (UNIT)), \
                   (size_t)width * itemsize);                                                            \
        }                                                                                                \
    }

PAIR(i32_elements, int32_t, 1)
PAIR(u32_elements, uint32_t, 1)
PAIR(i64_elements, int64_t, 1)
PAIR(i32_bytes, int32_t, itemsize)
PAIR(u32_bytes, uint32_t, itemsize)
PAIR(i64_bytes, int64_t, itemsize)
