/* What the simulated libraries share: a scenario file, and the memory that simulated processes hold.

   FAKE_SCENARIO names a text file that is read again at each call, so that a test can change it under a client.
   Lines are key=value; the last one wins:
     count=2                     cards
     0.total= 0.free= 0.reserved= 0.used=     bytes; free is what is free before simulated allocations
     0.name= 0.uuid= 0.pci=0000:3b:00.0 0.vendor=0x10de 0.integrated=1 0.addressing=2
     0.mig=1 0.slices=2          then 0.0.uuid= 0.0.total= ... for slice 0 of card 0, with 0.0.gi= and 0.0.ci=
     0.free@3=                   from the third memory query on (tenants that come and go)
     0.raw.free=                 verbatim, whatever is held (counters that wrapped)
     0.pids=123:1000,124:none    processes of the card
     ordinals=1,0                order in which the runtime numbers the cards
     err.FUNCTION=CODE  err.FUNCTION.0=CODE  err.FUNCTION@2=CODE (from the second call on)
     slow.FUNCTION=SECONDS
   What the simulated runtime allocates is counted in the file FAKE_SCENARIO.held, one u64 a card, so that the
   management library of the same or another process sees it. */
#ifndef SCENARIO_H
#define SCENARIO_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
typedef unsigned long long u64;
#define CARDS 16

/* ALONE: the rest of the function is one thread's at a time, as drivers are safe to call from several. */
static pthread_mutex_t one_at_a_time = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static inline void unlock(pthread_mutex_t **m) { pthread_mutex_unlock(*m); }
#define ALONE __attribute__((cleanup(unlock))) pthread_mutex_t *alone_ = &one_at_a_time; pthread_mutex_lock(alone_)

/* The scenario's text, read again when the file has changed; each thread has its own copy. */
static const char *scenario(void) {
  static __thread char content[16384];
  static __thread struct stat last;
  struct stat now;
  const char *path = getenv("FAKE_SCENARIO");
  if (!path || stat(path, &now)) return "";
  if (now.st_mtim.tv_sec != last.st_mtim.tv_sec || now.st_mtim.tv_nsec != last.st_mtim.tv_nsec || now.st_ino != last.st_ino) {
    FILE *f = fopen(path, "r");
    if (!f) return "";
    content[fread(content, 1, sizeof content - 1, f)] = 0;
    fclose(f);
    last = now;
  }
  return content;
}
static int text(const char *key, char *out, size_t n) {
  size_t k = strlen(key);
  int found = 0;
  for (const char *line = scenario(); *line;) {
    size_t length = strcspn(line, "\n");
    if (length > k && !strncmp(line, key, k) && line[k] == '=') {
      snprintf(out, n, "%.*s", (int)(length - k - 1), line + k + 1);
      found = 1;
    }
    line += length + (line[length] == '\n');
  }
  return found;
}
static u64 number(const char *key, u64 otherwise) {
  char b[128];
  return text(key, b, sizeof b) ? strtoull(b, 0, 0) : otherwise;
}
/* A card's key, or with slice >= 0 its slice's. */
static void keyed(char *out, size_t n, long card, long slice, const char *name) {
  if (slice < 0) snprintf(out, n, "%ld.%s", card, name);
  else snprintf(out, n, "%ld.%ld.%s", card, slice, name);
}
static u64 figure(long card, long slice, const char *name, u64 otherwise) {
  char k[96];
  keyed(k, sizeof k, card, slice, name);
  return number(k, otherwise);
}
/* The figure as it is from the queries'th query on. */
static u64 figure_at(long card, long slice, const char *name, long queries, u64 otherwise) {
  char k[96], at[128];
  u64 value = figure(card, slice, name, otherwise);
  keyed(k, sizeof k, card, slice, name);
  if (!strchr(scenario(), '@')) return value;
  for (long q = 1; q <= queries && q < 64; q++) {
    snprintf(at, sizeof at, "%s@%ld", k, q);
    value = number(at, value);
  }
  return value;
}
/* The code with which a call fails, 0 for success. Counts the calls of each function. */
static int failing(const char *function, long card) {
  static struct { char name[64]; long calls; } seen[64];
  char k[128];
  long calls = 1;
  for (int i = 0; i < 64; i++) {
    ALONE;
    if (!seen[i].name[0]) snprintf(seen[i].name, sizeof seen[i].name, "%s", function);
    if (!strcmp(seen[i].name, function)) { calls = ++seen[i].calls; break; }
  }
  snprintf(k, sizeof k, "slow.%s", function);
  double seconds = 0;
  char b[64];
  if (text(k, b, sizeof b)) seconds = atof(b);
  if (seconds > 0) usleep((useconds_t)(seconds * 1e6));
  snprintf(k, sizeof k, "err.%s", function);
  int code = (int)number(k, 0);
  if (card >= 0) {
    snprintf(k, sizeof k, "err.%s.%ld", function, card);
    code = (int)number(k, (u64)code);
  }
  for (long q = 1; strchr(scenario(), '@') && q <= calls && q < 64; q++) {
    snprintf(k, sizeof k, "err.%s@%ld", function, q);
    code = (int)number(k, (u64)code);
  }
  return code;
}
static u64 *held_bytes(void) {
  static u64 *held;
  static u64 own[CARDS];
  if (held) return held;
  const char *path = getenv("FAKE_SCENARIO");
  char name[600];
  snprintf(name, sizeof name, "%s.held", path ? path : "/nonexistent/fake");
  int fd = open(name, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, CARDS * sizeof(u64))) return held = own;
  void *m = mmap(0, CARDS * sizeof(u64), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return held = m == MAP_FAILED ? own : (u64 *)m;
}
#endif
