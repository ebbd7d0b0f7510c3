/* A simulated MACA runtime, libmcruntime.so: device memory is host memory with a real capacity, which the simulated
   libmxsml.so of this or another process sees. Devices are numbered as MACA_VISIBLE_DEVICES says, or by the scenario's
   ordinals. A context takes 0.context= bytes from the first allocation on a card to the last release. */
#include "scenario.h"
#include <pthread.h>
typedef int R;
enum { INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, BAD_DEVICE = 101 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static struct { void *at; size_t bytes; long card; } blocks[4096];
static int alive[CARDS];
static pid_t owner;
/* As a real runtime, it does not survive a fork. */
#define CALL(name) do { int e_ = failing(name, -1); if (e_) return e_; if (!owner) owner = getpid(); if (owner != getpid()) abort(); } while (0)

static int listed(long *cards) {
  char b[64] = "";
  const char *visible = getenv("MACA_VISIBLE_DEVICES");
  int n = 0;
  if (visible) snprintf(b, sizeof b, "%s", visible);
  else if (!text("ordinals", b, sizeof b)) {
    for (; n < (int)number("count", 1); n++) cards[n] = n;
    return n;
  }
  char *save = 0;
  for (char *part = strtok_r(b, ",", &save); part && n < CARDS; part = strtok_r(0, ",", &save)) cards[n++] = atol(part);
  return n;
}
static long card(int ordinal) {
  long cards[CARDS];
  return ordinal >= 0 && ordinal < listed(cards) ? cards[ordinal] : -1;
}
R mcGetDeviceCount(int *n) { CALL("mcGetDeviceCount"); long c[CARDS]; *n = listed(c); return *n ? 0 : NO_DEVICE; }
R mcGetDevice(int *d) { CALL("mcGetDevice"); *d = current; return 0; }
R mcSetDevice(int d) { CALL("mcSetDevice"); if (card(d) < 0) return BAD_DEVICE; current = d; return 0; }
R mcDeviceSynchronize(void) { CALL("mcDeviceSynchronize"); return 0; }
R mcDeviceGetPCIBusId(char *out, int n, int d) {
  CALL("mcDeviceGetPCIBusId");
  char k[64];
  if (card(d) < 0) return BAD_DEVICE;
  keyed(k, sizeof k, card(d), -1, "pci");
  return text(k, out, (size_t)n) ? 0 : INVALID;
}
static u64 room(long c) { return figure(c, -1, "free", figure(c, -1, "total", 0)); }
R mcMemGetInfo(size_t *free_, size_t *total) {
  CALL("mcMemGetInfo");
  long c = card(current);
  *total = figure(c, -1, "total", 0);
  *free_ = room(c) - held_bytes()[c];
  return 0;
}
static R allocated(void **p, size_t n) {
  long c = card(current);
  u64 context = alive[c] ? 0 : figure(c, -1, "context", 0);
  if (!n || held_bytes()[c] + context + n > room(c)) return OUT_OF_MEMORY;
  void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  for (int i = 0; i < 4096; i++)
    if (!blocks[i].at) {
      blocks[i].at = m; blocks[i].bytes = n; blocks[i].card = c;
      held_bytes()[c] += n + context;
      alive[c]++;
      memset(m, 0xa5, n < 4096 ? n : 4096); /* device memory comes as it was left */
      *p = m;
      return 0;
    }
  munmap(m, n);
  return OUT_OF_MEMORY;
}
static R freed(void *p) {
  for (int i = 0; i < 4096; i++)
    if (p && blocks[i].at == p) {
      long c = blocks[i].card;
      munmap(p, blocks[i].bytes);
      held_bytes()[c] -= blocks[i].bytes + (--alive[c] ? 0 : figure(c, -1, "context", 0));
      blocks[i].at = 0;
      return 0;
    }
  return INVALID;
}
/* A copy is on the current device's memory, whole, or refused. */
static int within(void *p, size_t n) {
  for (int i = 0; i < 4096; i++)
    if (blocks[i].at && (char *)p >= (char *)blocks[i].at && (char *)p + n <= (char *)blocks[i].at + blocks[i].bytes)
      return blocks[i].card == card(current);
  return 0;
}
#define LOCKED(call) do { pthread_mutex_lock(&lock); R r_ = (call); pthread_mutex_unlock(&lock); return r_; } while (0)
R mcMalloc(void **p, size_t n) { CALL("mcMalloc"); LOCKED(allocated(p, n)); }
R mcFree(void *p) { CALL("mcFree"); LOCKED(freed(p)); }
static R set(void *p, int v, size_t n) { if (!within(p, n)) return INVALID; memset(p, v, n); return 0; }
static R copied(void *d, void *s, size_t n, int way) {
  if (way == 1 ? !within(d, n) : way == 2 ? !within(s, n) : 1) return INVALID;
  memcpy(d, s, n);
  return 0;
}
R mcMemset(void *p, int v, size_t n) { CALL("mcMemset"); LOCKED(set(p, v, n)); }
R mcMemcpy(void *d, const void *s, size_t n, int way) { CALL("mcMemcpy"); LOCKED(copied(d, (void *)s, n, way)); }
