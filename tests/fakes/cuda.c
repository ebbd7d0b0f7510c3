/* A simulated driver, libcuda.so.1: device memory is host memory with a real capacity. Clients find functions through
   cuGetProcAddress, which knows them by their names without a version. */
#include "scenario.h"
typedef int R;
typedef u64 ptr;
enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, BAD_DEVICE = 101, BAD_CONTEXT = 201, UNKNOWN_SYMBOL = 500 };
static int ready, retained[CARDS];
static pid_t starter; /* a child that was forked later has no context, and gets none */
static __thread int stack[64], depth; /* a context is current to a thread */
#define CALL(name) do { int e_ = failing(name, -1); if (!e_ && (!ready || starter != getpid())) e_ = NOT_INITIALIZED; if (e_) return e_; } while (0)
/* The card behind an ordinal. */
static long card(int ordinal) {
  char b[64], *save = 0;
  if (!text("ordinals", b, sizeof b)) return ordinal;
  char *part = strtok_r(b, ",", &save);
  for (int i = 0; part && i < ordinal; i++) part = strtok_r(0, ",", &save);
  return part ? atol(part) : -1;
}
static int ordinals(void) {
  char b[64];
  if (!text("ordinals", b, sizeof b)) return (int)number("count", 1);
  int n = b[0] != 0;
  for (char *c = b; *c; c++) n += *c == ',';
  return n;
}
static long slice(long c) { return (long)figure(c, -1, "runtime_slice", (u64)-1); }
static u64 context_bytes(long c) { return figure(c, -1, "context", 0); }

static R init_(unsigned flags) {
  (void)flags;
  int e = failing("cuInit", -1);
  if (!e && ready && starter != getpid()) e = NOT_INITIALIZED;
  if (!e) { ready = 1; starter = getpid(); }
  return e;
}
static R version_(int *v) { *v = (int)number("cuda", 13000); return 0; }
static R count_(int *n) { CALL("cuDeviceGetCount"); *n = ordinals(); return 0; }
static R get_(int *d, int o) { CALL("cuDeviceGet"); if (o < 0 || o >= ordinals()) return BAD_DEVICE; *d = o; return 0; }
static R name_(char *o, int n, int d) { CALL("cuDeviceGetName"); char k[64]; keyed(k, 64, card(d), -1, "name"); if (!text(k, o, (size_t)n)) snprintf(o, (size_t)n, "simulated"); return 0; }
static R uuid_(unsigned char *o, int d) {
  CALL("cuDeviceGetUuid");
  char k[64], b[128] = "";
  keyed(k, 64, card(d), slice(card(d)), "uuid");
  if (!text(k, b, sizeof b)) return INVALID;
  char *p = strchr(b, '-');
  if (!p) return INVALID;
  for (int i = 0; i < 16; p++) { unsigned v; if (!*p) return INVALID; if (*p == '-') continue; if (sscanf(p, "%2x", &v) != 1) return INVALID; o[i++] = (unsigned char)v; p++; }
  return 0;
}
static R pci_(char *o, int n, int d) { CALL("cuDeviceGetPCIBusId"); char k[64]; keyed(k, 64, card(d), -1, "pci"); return text(k, o, (size_t)n) ? 0 : INVALID; }
static R attribute_(int *v, int what, int d) { CALL("cuDeviceGetAttribute"); *v = what == 18 ? (int)figure(card(d), -1, "integrated", 0) : 0; return 0; }
static R retain_(u64 *c, int d) {
  CALL("cuDevicePrimaryCtxRetain");
  ALONE;
  long n = card(d);
  if (!retained[n]++) held_bytes()[n] += context_bytes(n);
  *c = (u64)(d + 1);
  return 0;
}
static R release_(int d) { CALL("cuDevicePrimaryCtxRelease"); ALONE; long n = card(d); if (!retained[n]) return BAD_CONTEXT; if (!--retained[n]) held_bytes()[n] -= context_bytes(n); return 0; }
static R state_(int d, unsigned *flags, int *active) { CALL("cuDevicePrimaryCtxGetState"); *flags = 0; *active = retained[card(d)] > 0; return 0; }
static R push_(u64 c) { CALL("cuCtxPushCurrent"); if (depth >= 64) return INVALID; stack[depth++] = (int)c - 1; return 0; }
static R pop_(u64 *c) { CALL("cuCtxPopCurrent"); if (!depth) return BAD_CONTEXT; *c = (u64)(stack[--depth] + 1); return 0; }
static R synchronize_(void) { CALL("cuCtxSynchronize"); return depth ? 0 : BAD_CONTEXT; }
static R info_(size_t *f, size_t *t) {
  CALL("cuMemGetInfo");
  if (!depth) return BAD_CONTEXT;
  long c = card(stack[depth - 1]), s = slice(c);
  *t = figure(c, s, "runtime_total", figure(c, s, "total", 0));
  u64 free_ = figure(c, s, "free", *t - figure(c, s, "reserved", 0)), held = held_bytes()[c];
  *f = figure(c, s, "runtime_free", free_ > held ? free_ - held : 0);
  return 0;
}
/* What was handed out: an address, its bytes and its card. */
static struct { ptr at; size_t bytes; long card; } blocks[4096];
static R alloc_(ptr *p, size_t n) {
  CALL("cuMemAlloc");
  ALONE;
  if (!depth || !n) return depth ? INVALID : BAD_CONTEXT;
  long c = card(stack[depth - 1]), s = slice(c);
  u64 total = figure(c, s, "total", 0), room = figure(c, s, "free", total - figure(c, s, "reserved", 0));
  u64 largest = figure(c, s, "largest", room);
  if (held_bytes()[c] + n > room || n > largest) return OUT_OF_MEMORY;
  void *m = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  for (int i = 0; i < 4096; i++)
    if (!blocks[i].at) {
      blocks[i].at = (ptr)m; blocks[i].bytes = n; blocks[i].card = c;
      held_bytes()[c] += n;
      memset(m, 0xa5, n < 4096 ? n : 4096); /* device memory comes as it was left */
      *p = (ptr)m;
      return 0;
    }
  munmap(m, n);
  return OUT_OF_MEMORY;
}
static R free_(ptr p) {
  CALL("cuMemFree");
  ALONE;
  for (int i = 0; i < 4096; i++)
    if (p && blocks[i].at == p) { munmap((void *)p, blocks[i].bytes); held_bytes()[blocks[i].card] -= blocks[i].bytes; blocks[i].at = 0; return 0; }
  return INVALID;
}
/* Whether a range lies within one block, as a real device would fault if it did not. */
static int within(ptr p, size_t n) {
  for (int i = 0; i < 4096; i++) if (blocks[i].at && p >= blocks[i].at && p + n <= blocks[i].at + blocks[i].bytes) return 1;
  return 0;
}
static R set_(ptr p, unsigned char v, size_t n) {
  CALL("cuMemsetD8");
  if (!within(p, n)) return INVALID;
  /* Zeroing untouched pages of a mapping would commit them: give them back instead. */
  if (!v && n >= (1u << 20) && !(p & 4095)) { size_t whole = n & ~(size_t)4095; madvise((void *)p, whole, MADV_DONTNEED); p += whole; n -= whole; }
  memset((void *)p, v, n);
  return 0;
}
static R up_(ptr d, const void *s, size_t n) { CALL("cuMemcpyHtoD"); if (!within(d, n)) return INVALID; memcpy((void *)d, s, n); return 0; }
static R down_(void *d, ptr s, size_t n) { CALL("cuMemcpyDtoH"); if (!within(s, n)) return INVALID; memcpy(d, (void *)s, n); return 0; }
static R error_(int e, const char **s) { static char b[48]; snprintf(b, 48, e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_%d", e); *s = b; return 0; }
R cuGetProcAddress_v2(const char *, void **, int, u64, int *);
static struct { const char *name; void *at; } table[] = {
  {"cuInit", init_}, {"cuDriverGetVersion", version_}, {"cuDeviceGetCount", count_}, {"cuDeviceGet", get_},
  {"cuDeviceGetName", name_}, {"cuDeviceGetUuid", uuid_}, {"cuDeviceGetPCIBusId", pci_},
  {"cuDeviceGetAttribute", attribute_}, {"cuDevicePrimaryCtxRetain", retain_}, {"cuDevicePrimaryCtxRelease", release_},
  {"cuDevicePrimaryCtxGetState", state_}, {"cuCtxPushCurrent", push_}, {"cuCtxPopCurrent", pop_},
  {"cuCtxSynchronize", synchronize_}, {"cuMemGetInfo", info_}, {"cuMemAlloc", alloc_}, {"cuMemFree", free_},
  {"cuMemsetD8", set_}, {"cuMemcpyHtoD", up_}, {"cuMemcpyDtoH", down_}, {"cuGetErrorName", error_}, {"cuGetErrorString", error_},
  {"cuGetProcAddress", cuGetProcAddress_v2}};
R cuGetProcAddress_v2(const char *name, void **at, int version, u64 flags, int *status) {
  (void)version; (void)flags;
  *at = 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) if (!strcmp(name, table[i].name)) *at = table[i].at;
  if (status) *status = *at ? 0 : 1;
  return *at ? 0 : UNKNOWN_SYMBOL;
}
R cuInit(unsigned f) { return init_(f); }
R cuDriverGetVersion(int *v) { return version_(v); }
