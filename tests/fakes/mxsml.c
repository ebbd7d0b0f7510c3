/* A simulated libmxsml.so by the public header MxSml.h, version 2.3.1: memory in KiB, processes in bytes.
   -DOLD leaves out what older builds lack: the number of dies, and texts of errors.
   Beside the keys of scenario.h: 0.mode=1 (divided) or 2 (virtual), 0.dies=2, 0.raw.used= in KiB, verbatim. */
#include "scenario.h"
typedef unsigned ret;
enum { NO_DEVICE = 2, INVALID_ID = 6, INVALID_INPUT = 9 };
typedef struct { unsigned device, type; char bdf[32]; unsigned gpu, node; char uuid[96]; unsigned brand, mode; char name[32]; } info;
typedef struct { long visible_total, visible_used, total, used, xtt_total, xtt_used; } memory;
typedef struct { char bdf[32]; unsigned gpu; unsigned long bytes; } use;
typedef struct { unsigned pid; char name[64]; unsigned count; use uses[64]; } process;
static int started;
#define CALL(name, card) do { int e_ = failing(name, card); if (e_) return (ret)e_; if (!started) return 1; } while (0)
#define VALID(card) do { if ((card) >= number("count", 1)) return INVALID_ID; } while (0)

static int word(unsigned card, const char *name, char *out, size_t n) {
  char k[64];
  keyed(k, sizeof k, (long)card, -1, name);
  return text(k, out, n);
}
ret mxSmlInit(void) {
  int e = failing("mxSmlInit", -1);
  if (e) return (ret)e;
  started = 1;
  return number("count", 1) ? 0 : NO_DEVICE;
}
unsigned mxSmlGetDeviceCount(void) { return (unsigned)number("count", 1); }
ret mxSmlGetDeviceInfo(unsigned card, info *out) {
  CALL("mxSmlGetDeviceInfo", (long)card);
  VALID(card);
  memset(out, 0, sizeof *out);
  out->device = out->gpu = card;
  out->mode = (unsigned)figure((long)card, -1, "mode", 0);
  word(card, "uuid", out->uuid, sizeof out->uuid);
  word(card, "pci", out->bdf, sizeof out->bdf);
  word(card, "name", out->name, sizeof out->name);
  return 0;
}
ret mxSmlGetMemoryInfo(unsigned card, memory *out) {
  CALL("mxSmlGetMemoryInfo", (long)card);
  VALID(card);
  u64 total = figure((long)card, -1, "total", 0), room = figure((long)card, -1, "free", total);
  memset(out, 0, sizeof *out);
  out->total = (long)(total / 1024);
  out->used = (long)((total - room + held_bytes()[card]) / 1024);
  char b[32];
  if (word(card, "raw.used", b, sizeof b)) out->used = strtol(b, 0, 0);
  out->visible_total = out->total / 2; /* what the host can map is a part of it */
  out->visible_used = out->used / 2;
  out->xtt_total = 1 << 20;
  return 0;
}
/* Entries pid:bytes of each card; "self" is this process and what it holds. */
static unsigned listed(process *out, unsigned room) {
  unsigned n = 0;
  for (unsigned card = 0; card < number("count", 1); card++) {
    char b[256], *save = 0;
    if (!word(card, "pids", b, sizeof b)) continue;
    for (char *part = strtok_r(b, ",", &save); part; part = strtok_r(0, ",", &save), n++) {
      if (!out || n >= room) continue;
      char *bytes = strchr(part, ':');
      int self = !strncmp(part, "self", 4);
      memset(&out[n], 0, sizeof out[n]);
      out[n].pid = self ? (unsigned)getpid() : (unsigned)strtoul(part, 0, 0);
      out[n].count = 1;
      word(card, "pci", out[n].uses[0].bdf, sizeof out[n].uses[0].bdf);
      out[n].uses[0].gpu = card;
      out[n].uses[0].bytes = strtoull(bytes ? bytes + 1 : "0", 0, 0) + (self ? held_bytes()[card] : 0);
    }
  }
  return n;
}
ret mxSmlGetNumberOfProcess(unsigned *n) { CALL("mxSmlGetNumberOfProcess", -1); *n = listed(0, 0); return 0; }
ret mxSmlGetProcessInfo(unsigned room, process *out) {
  CALL("mxSmlGetProcessInfo", -1);
  if (!out) return INVALID_INPUT;
  listed(out, room);
  return 0;
}
#ifndef OLD
ret mxSmlGetDeviceDieCount(unsigned card, unsigned *n) {
  CALL("mxSmlGetDeviceDieCount", (long)card);
  VALID(card);
  *n = (unsigned)figure((long)card, -1, "dies", 1);
  return 0;
}
const char *mxSmlGetErrorString(ret code) {
  static char b[64];
  snprintf(b, sizeof b, "simulated error %u", code);
  return b;
}
#endif
