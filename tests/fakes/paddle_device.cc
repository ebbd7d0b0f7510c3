// A simulated Paddle custom device, iluvatar_gpu or -DDEVICE_TYPE: host memory with a capacity, counted like the simulated runtime's.
// As in Iluvatar's own plug-in, the callback for device memory statistics is null and the least chunk is 256 bytes.
#include <string>
#include "paddle/phi/backends/device_ext.h"
extern "C" {
#include "scenario.h"
}
#ifndef DEVICE_TYPE
#define DEVICE_TYPE "iluvatar_gpu"
#endif
static thread_local int current;
static C_Status ok() { return C_SUCCESS; }
static C_Status device(const C_Device) { return C_SUCCESS; }
static C_Status set_device(const C_Device d) { current = d->id; return C_SUCCESS; }
static C_Status get_device(const C_Device d) { d->id = current; return C_SUCCESS; }
static C_Status make_stream(const C_Device, C_Stream *s) { *s = reinterpret_cast<C_Stream>(1); return C_SUCCESS; }
static C_Status stream(const C_Device, C_Stream) { return C_SUCCESS; }
static C_Status callback(const C_Device d, C_Stream s, C_Callback c, void *data) { C_Status status = C_SUCCESS; c(d, s, data, &status); return status; }
static C_Status make_event(const C_Device, C_Event *e) { *e = reinterpret_cast<C_Event>(1); return C_SUCCESS; }
static C_Status record(const C_Device, C_Stream, C_Event) { return C_SUCCESS; }
static C_Status event(const C_Device, C_Event) { return C_SUCCESS; }
static C_Status allocate(const C_Device d, void **p, size_t n) {
  ALONE;
  *p = nullptr;
  u64 total = figure(d->id, -1, "total", 0), room = figure(d->id, -1, "free", total);
  if (failing("allocate", d->id) || held_bytes()[d->id] + n > room) return C_ERROR;
  void *m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return C_ERROR;
  memset(m, 0xa5, n < 4096 ? n : 4096);  // device memory comes as it was left
  held_bytes()[d->id] += n;
  *p = m;
  return C_SUCCESS;
}
static C_Status give_back(const C_Device d, void *p, size_t n) { ALONE; munmap(p, n); held_bytes()[d->id] -= n; return C_SUCCESS; }
static C_Status host(const C_Device, void **p, size_t n) { *p = malloc(n); return C_SUCCESS; }
static C_Status host_free(const C_Device, void *p, size_t) { free(p); return C_SUCCESS; }
static C_Status fill(const C_Device, void *p, unsigned char v, size_t n) { memset(p, v, n); return C_SUCCESS; }
static C_Status copy(const C_Device, void *d, const void *s, size_t n) { memcpy(d, s, n); return C_SUCCESS; }
static C_Status peer(const C_Device, const C_Device, void *d, const void *s, size_t n) { memcpy(d, s, n); return C_SUCCESS; }
static C_Status copy_later(const C_Device, C_Stream, void *d, const void *s, size_t n) { memcpy(d, s, n); return C_SUCCESS; }
static C_Status peer_later(const C_Device, const C_Device, C_Stream, void *d, const void *s, size_t n) { memcpy(d, s, n); return C_SUCCESS; }
static C_Status count(size_t *n) { *n = number("count", 1); return C_SUCCESS; }
static C_Status list(size_t *ids) { for (size_t i = 0; i < number("count", 1); i++) ids[i] = i; return C_SUCCESS; }
static C_Status least(const C_Device, size_t *n) { *n = 256; return C_SUCCESS; }
static C_Status capability(const C_Device, size_t *n) { *n = 71; return C_SUCCESS; }
static C_Status version(const C_Device, size_t *n) { *n = 1; return C_SUCCESS; }
// Laid out as phi::DeviceProp, which Paddle hands over without a type.
struct Properties { std::string name; int major, minor; size_t total; int processors; bool several, integrated; };
static C_Status properties(const C_Device d, void *out) {
  static_cast<Properties *>(out)->total = figure(d->id, -1, "paddle_total", 0);
  return C_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams *p) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(p);
  p->device_type = const_cast<char *>(DEVICE_TYPE);
  p->sub_device_type = const_cast<char *>("simulated");
  C_DeviceInterface *i = p->interface;
  size_t size = i->size;
  memset(i, 0, sizeof *i);
  i->size = size;
  i->initialize = ok; i->finalize = ok;
  i->init_device = device; i->deinit_device = device; i->set_device = set_device; i->get_device = get_device;
  i->create_stream = make_stream; i->destroy_stream = stream; i->query_stream = stream; i->stream_add_callback = callback;
  i->create_event = make_event; i->record_event = record; i->destroy_event = event; i->query_event = event;
  i->synchronize_device = device; i->synchronize_stream = stream; i->synchronize_event = event; i->stream_wait_event = record;
  i->device_memory_allocate = allocate; i->device_memory_deallocate = give_back;
  i->host_memory_allocate = host; i->host_memory_deallocate = host_free;
  i->device_memory_set = fill; i->memory_copy_h2d = copy; i->memory_copy_d2h = copy; i->memory_copy_d2d = copy; i->memory_copy_p2p = peer;
  i->async_memory_copy_h2d = copy_later; i->async_memory_copy_d2h = copy_later; i->async_memory_copy_d2d = copy_later; i->async_memory_copy_p2p = peer_later;
  i->get_device_count = count; i->get_device_list = list; i->device_min_chunk_size = least;
  i->get_compute_capability = capability; i->get_device_properties = properties; i->get_runtime_version = version; i->get_driver_version = version;
}
