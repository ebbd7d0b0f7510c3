/* A simulated management library: libnvidia-ml.so.1, or with -DIXML libixml.so, which lacks what IXML's header lacks.
   -DNO_V2 leaves out the second version of the memory query, -DPLAIN_INIT the second version of init. */
#include "scenario.h"
typedef int ret;
typedef void *handle;
enum { UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, VERSION = 25 };
typedef struct { u64 total, free, used; } memory1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory2;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
static int references;
#define CARD(h) (((long)(size_t)(h) & 0xffff) - 1)
#define SLICE(h) (((long)(size_t)(h) >> 16) - 1)
#define HANDLE(card, slice) ((handle)(size_t)(((card) + 1) | (((slice) + 1) << 16)))
#define CALL(name, card) do { int e_ = failing(name, card); if (!e_ && !references) e_ = UNINITIALIZED; if (e_) return e_; } while (0)

static ret start(void) { int e = failing("nvmlInit", -1); ALONE; if (!e) references++; return e; }
#ifdef PLAIN_INIT
ret nvmlInit(void) { return start(); }
#else
ret nvmlInit_v2(void) { return start(); }
#endif
ret nvmlShutdown(void) {
  CALL("nvmlShutdown", -1);
  ALONE;
  references--;
  const char *path = getenv("FAKE_BALANCE"); /* what is still open, for tests of balance */
  FILE *f = path ? fopen(path, "w") : 0;
  if (f) { fprintf(f, "%d", references); fclose(f); }
  return 0;
}
ret nvmlDeviceGetCount_v2(unsigned *n) { CALL("nvmlDeviceGetCount", -1); *n = (unsigned)number("count", 1); return 0; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *h) {
  CALL("nvmlDeviceGetHandleByIndex", (long)i);
  if (i >= number("count", 1)) return INVALID;
  *h = HANDLE((long)i, -1L);
  return 0;
}
ret nvmlDeviceGetHandleByUUID(const char *uuid, handle *h) {
  CALL("nvmlDeviceGetHandleByUUID", -1);
  for (long c = 0; c < (long)number("count", 1); c++)
    for (long s = -1; s < (long)figure(c, -1, "slices", 0); s++) {
      char k[96], b[128];
      keyed(k, sizeof k, c, s, "uuid");
      if (text(k, b, sizeof b) && !strcmp(b, uuid)) { *h = HANDLE(c, s); return 0; }
    }
  return NOT_FOUND;
}
static void read_memory(handle h, memory2 *m) {
  static long queries[CARDS];
  long c = CARD(h), s = SLICE(h), q = ++queries[c];
  u64 held = held_bytes()[c];
  m->total = figure_at(c, s, "total", q, 0);
  m->reserved = figure(c, s, "reserved", 0);
  m->free = figure_at(c, s, "free", q, m->total - m->reserved);
  m->free = m->free > held ? m->free - held : 0;
  m->free = figure(c, s, "raw.free", m->free);
  m->used = figure(c, s, "used", m->total - m->free - m->reserved);
}
ret nvmlDeviceGetMemoryInfo(handle h, memory1 *out) {
  CALL("nvmlDeviceGetMemoryInfo", CARD(h));
  memory2 m;
  read_memory(h, &m);
  out->total = m.total; out->free = m.free; out->used = m.total - m.free; /* counts what is reserved */
  return 0;
}
#ifndef NO_V2
ret nvmlDeviceGetMemoryInfo_v2(handle h, memory2 *out) {
  CALL("nvmlDeviceGetMemoryInfo_v2", CARD(h));
#ifdef IXML
  if (out->version != 2) return VERSION;
#else
  if (out->version != 0x02000028) return VERSION;
#endif
  unsigned version = out->version;
  read_memory(h, out);
  out->version = version;
  return 0;
}
#endif
static ret string(handle h, const char *function, const char *name, char *out, unsigned n) {
  CALL(function, CARD(h));
  char k[96];
  keyed(k, sizeof k, CARD(h), SLICE(h), name);
  return text(k, out, n) ? 0 : UNSUPPORTED;
}
ret nvmlDeviceGetName(handle h, char *o, unsigned n) { return string(h, "nvmlDeviceGetName", "name", o, n); }
ret nvmlDeviceGetUUID(handle h, char *o, unsigned n) { return string(h, "nvmlDeviceGetUUID", "uuid", o, n); }
ret nvmlDeviceGetPciInfo_v3(handle h, pci *p) {
  CALL("nvmlDeviceGetPciInfo", CARD(h));
  char b[32] = "";
  char k[64];
  keyed(k, sizeof k, CARD(h), -1, "pci");
  if (!text(k, b, sizeof b)) return UNSUPPORTED;
  memset(p, 0, sizeof *p);
  unsigned domain, bus, device;
  if (sscanf(b, "%x:%x:%x", &domain, &bus, &device) != 3) return UNSUPPORTED;
  p->domain = domain; p->bus = bus; p->device = device;
#ifdef IXML
  unsigned vendor = 0x1e3e;
#else
  unsigned vendor = 0x10de;
#endif
  p->id = 0x20b00000u | (unsigned)figure(CARD(h), -1, "vendor", vendor);
  snprintf(p->bus_id, sizeof p->bus_id, "%08X:%02X:%02X.0", domain, bus, device);
  snprintf(p->legacy, sizeof p->legacy, "%04X:%02X:%02X.0", domain, bus, device);
  return 0;
}
/* Entries pid:bytes, "none" for bytes that the driver does not give; "self" is this process and what it holds. */
static unsigned processes(handle h, unsigned *pids, u64 *bytes) {
  char b[256], k[64], *save = 0;
  keyed(k, sizeof k, CARD(h), -1, "pids");
  if (!text(k, b, sizeof b)) return 0;
  unsigned n = 0;
  for (char *part = strtok_r(b, ",", &save); part && n < 32; part = strtok_r(0, ",", &save), n++) {
    char *bytes_of = strchr(part, ':');
    pids[n] = !strncmp(part, "self", 4) ? (unsigned)getpid() : (unsigned)strtoul(part, 0, 0);
    bytes[n] = !bytes_of || !strcmp(bytes_of + 1, "none") ? ~0ull : strtoull(bytes_of + 1, 0, 0);
    if (!strncmp(part, "self", 4) && bytes[n] != ~0ull) bytes[n] += held_bytes()[CARD(h)];
  }
  return n;
}
#ifdef IXML
typedef struct { unsigned pid; u64 bytes; } process;
ret nvmlDeviceGetComputeRunningProcesses(handle h, unsigned *n, process *out) {
#else
typedef struct { unsigned pid; u64 bytes; unsigned gi, ci; } process;
#ifdef NO_V2 /* R510 brought both */
#define nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetComputeRunningProcesses_v2
#endif
ret nvmlDeviceGetComputeRunningProcesses_v3(handle h, unsigned *n, process *out) {
#endif
  CALL("nvmlDeviceGetComputeRunningProcesses", CARD(h));
  unsigned pids[32];
  u64 bytes[32];
  unsigned count = processes(h, pids, bytes);
  if (!out || *n < count) { *n = count; return count ? SMALL : 0; }
  for (unsigned i = 0; i < count; i++) { memset(&out[i], 0, sizeof out[i]); out[i].pid = pids[i]; out[i].bytes = bytes[i]; }
  *n = count;
  return 0;
}
#ifndef IXML
ret nvmlInitWithFlags(unsigned flags) { (void)flags; return start(); }
const char *nvmlErrorString(ret code) { static char b[64]; snprintf(b, 64, "simulated error %d", code); return b; }
ret nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *later) {
  CALL("nvmlDeviceGetMigMode", CARD(h));
  char k[64], b[16];
  keyed(k, sizeof k, CARD(h), -1, "mig");
  if (!text(k, b, sizeof b)) return UNSUPPORTED;
  *now = *later = (unsigned)atoi(b);
  return 0;
}
ret nvmlDeviceGetMaxMigDeviceCount(handle h, unsigned *n) { CALL("nvmlDeviceGetMaxMigDeviceCount", CARD(h)); *n = 7; return 0; }
ret nvmlDeviceGetMigDeviceHandleByIndex(handle h, unsigned i, handle *out) {
  CALL("nvmlDeviceGetMigDeviceHandleByIndex", CARD(h));
  if (i >= figure(CARD(h), -1, "slices", 0)) return NOT_FOUND;
  *out = HANDLE(CARD(h), (long)i);
  return 0;
}
ret nvmlDeviceGetGpuInstanceId(handle h, unsigned *id) { CALL("nvmlDeviceGetGpuInstanceId", CARD(h)); *id = (unsigned)figure(CARD(h), SLICE(h), "gi", 0); return 0; }
ret nvmlDeviceGetComputeInstanceId(handle h, unsigned *id) { CALL("nvmlDeviceGetComputeInstanceId", CARD(h)); *id = (unsigned)figure(CARD(h), SLICE(h), "ci", 0); return 0; }
ret nvmlDeviceGetAddressingMode(handle h, unsigned *mode) {
  CALL("nvmlDeviceGetAddressingMode", CARD(h));
  char k[64], b[16];
  keyed(k, sizeof k, CARD(h), -1, "addressing");
  if (!text(k, b, sizeof b)) return UNSUPPORTED;
  mode[1] = (unsigned)atoi(b);
  return 0;
}
#endif
