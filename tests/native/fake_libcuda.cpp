// NVIDIA's driver without a GPU, for tests of its callers: a libcuda.so.1 whose device memory is host memory.
//
// It runs the work of a stream at once, or, behind a wait for a flag or an event, at the first later call of the driver
// that finds the wait over. It checks its caller. The following are errors, as with the real driver: a call without a
// current context, an unknown address or handle, a copy beyond an allocation, or a missing flag. Allocations are
// memfds, which other processes open by exported handles. Kernels are those that tests compile for the host
// (cuda_on_host.h), in the libraries that FAKE_CUDA_KERNELS lists with colons.
//
// Other variables are read at each call. FAKE_CUDA_FAIL, such as "cuInit=100,cuMemAlloc=2", makes calls fail with these
// codes. FAKE_CUDA_VERSION is the CUDA version of the driver. FAKE_CUDA_CAPABILITY is the compute capability of the
// devices, such as "90". FAKE_CUDA_PEERS, 0 or 1, says whether devices can use each other's memory, and FAKE_CUDA_POOLS
// whether they have pools of memory. FAKE_CUDA_LOST is
// the code that every call with a context returns, as after a kernel that has ended the context. While FAKE_CUDA_STUCK
// is 1, work waits for a process that does not live any more: calls that release memory do not return, and no event
// happens.
//
// Calls that release memory wait for no work, because CUDA does not promise that they do. If work that is under way
// uses memory that is released, the double ends the process with a message; so it does if a stream is used that has
// been destroyed. A new stream has the handle of one that was destroyed.
//
// FAKE_CUDA_DEPTH is the number of calls that a stream keeps: a thread that issues one more waits for room. To the
// file FAKE_CUDA_LOG the double appends a line for each call that issues work, and for each change of the current
// context: the number of the thread, the name and the arguments.
//
// A forked child of a process that has used the driver gets NOT_INITIALIZED from every call. While a thread captures a
// graph, calls that are unsafe then fail and end the capture, unless their thread has another capture mode. Work on a
// stream that is captured runs when the graph is launched. Events order no work in graphs.

#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Result {
  success = 0,
  invalid_value = 1,
  not_initialized = 3,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  invalid_handle = 400,
  not_found = 500,
  not_supported = 801,
  not_ready = 600,
  already_registered = 712,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_isolation = 905,
};

enum class Kind { device, pooled, managed, pinned, opened, registered };

struct Memory {
  size_t nbytes;
  int descriptor;
  Kind kind;
};

// The records of an event that have been issued, and the last one that has happened.
struct Records {
  uint64_t issued = 0;
  uint64_t happened = 0;
};

struct Event {
  unsigned flags;
  bool opened;
  std::shared_ptr<Records> records = std::make_shared<Records>();
};

// Work of a stream that waits, and the addresses that it uses.
struct Task {
  std::function<bool()> is_ready;
  std::function<void()> run;
  std::vector<uintptr_t> touches = {};
};

// A kernel of the host, the sizes of its parameters, with a 0 behind them, the threads of its blocks, and whether its
// code is on the device.
struct Kernel {
  std::string name;
  const size_t* sizes;
  unsigned threads;
  bool is_loaded = false;
};

// A handle for other processes, with 64 bytes as in the real driver.
struct Handle {
  pid_t process;
  int descriptor;
  uint64_t nbytes;
  uint64_t inode;
  char rest[40];
};
static_assert(sizeof(Handle) == 64);

// The first fields of CUmemPoolProps.
struct PoolProperties {
  int kind;
  int handles;
  int place;
  int ordinal;
};

constexpr int devices = 2;
constexpr int multiprocessors = 4;
constexpr int blocks_of_multiprocessor = 2;
constexpr size_t page_nbytes = size_t{2} << 20;  // allocations begin at multiples of it

// The recording of a graph on a stream. A call that is unsafe then makes it invalid.
struct Capture {
  std::thread::id thread;
  int mode;
  bool is_valid;
  std::vector<Task> work = {};
};
enum CaptureMode { global = 0, thread_local_mode = 1, relaxed = 2 };

struct State {
  std::recursive_mutex mutex;
  pid_t initialized = 0;  // the process
  std::map<uintptr_t, Memory> memory;
  std::set<void*> streams;
  std::deque<char> stream_handles;  // what handles of streams point to
  std::vector<void*> ended_streams;
  std::map<void*, Capture> capturing;
  std::map<void*, Event> events;
  std::map<void*, std::vector<Task>> graphs;  // also those that can be launched
  std::map<void*, Kernel> functions;
  std::map<void*, std::deque<Task>> queues;  // by stream; the default streams are one
  std::set<void*> modules;
  std::set<void*> pools;
};
State& state() {
  static State found;
  return found;
}
thread_local std::vector<void*> contexts;
thread_local int capture_mode = CaptureMode::global;
int primary[devices];  // the contexts are addresses of its elements

int number_of(const char* variable, int otherwise) {
  const char* text = getenv(variable);
  return text != nullptr ? atoi(text) : otherwise;
}

int failure_of(const std::string& call) {
  const char* text = getenv("FAKE_CUDA_FAIL");
  const std::string wanted = std::string(",") + (text != nullptr ? text : "") + ",";
  const size_t at = wanted.find("," + call + "=");
  return at == std::string::npos ? success : atoi(wanted.c_str() + at + call.size() + 2);
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// Returns the allocation that contains an address.
std::map<uintptr_t, Memory>::iterator whole_of(uintptr_t address) {
  auto& memory = state().memory;
  auto found = memory.upper_bound(address);
  if (found == memory.begin()) return memory.end();
  --found;
  return address < found->first + found->second.nbytes ? found : memory.end();
}

bool covers(uintptr_t address, size_t nbytes) {
  const auto found = whole_of(address);
  return found != state().memory.end() && address + nbytes <= found->first + found->second.nbytes;
}

[[noreturn]] void trap(const char* broken) {
  fprintf(stderr, "the driver's double: %s\n", broken);
  abort();
}

bool is_stream(void* stream) {
  for (void* ended : state().ended_streams)
    if (ended == stream) trap("a stream is used that has been destroyed");
  return number(stream) <= 2 || state().streams.count(stream) != 0;
}

// Ends the process if work that is under way uses some memory.
void require_unused(uintptr_t address, size_t nbytes) {
  for (const auto& [stream, queue] : state().queues)
    for (const Task& task : queue)
      for (const uintptr_t touched : task.touches)
        if (address <= touched && touched < address + nbytes) trap("memory is released that work under way still uses");
}

void* map_aligned(int descriptor, size_t nbytes) {
  char* room = static_cast<char*>(mmap(nullptr, nbytes + page_nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  char* at = room + (page_nbytes - number(room) % page_nbytes) % page_nbytes;
  void* mapped = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

void* make_memory(size_t nbytes, Kind kind) {
  const int descriptor = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(nbytes)) != 0) return nullptr;
  void* made = map_aligned(descriptor, nbytes);
  if (made != nullptr) state().memory[number(made)] = {nbytes, descriptor, kind};
  return made;
}

int end_memory(uintptr_t address, bool opened) {
  const auto found = state().memory.find(address);
  if (found == state().memory.end() || (found->second.kind == Kind::opened) != opened) return invalid_value;
  require_unused(address, found->second.nbytes);
  munmap(reinterpret_cast<void*>(address), found->second.nbytes);
  close(found->second.descriptor);
  state().memory.erase(found);
  return success;
}

// Returns whether a call that is unsafe during captures is forbidden to this thread; then it ends the captures.
bool is_unsafe_now() {
  bool is_unsafe = false;
  for (auto& [stream, capture] : state().capturing) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    const bool counts = capture_mode == CaptureMode::global ? capture.mode == CaptureMode::global || is_own : is_own;
    if (capture_mode == CaptureMode::relaxed || capture.mode == CaptureMode::relaxed || !counts) continue;
    capture.is_valid = false;
    is_unsafe = true;
  }
  return is_unsafe;
}

// Makes all captures of the context invalid; returns whether there are any.
bool ends_captures() {
  for (auto& [stream, capture] : state().capturing) capture.is_valid = false;
  return !state().capturing.empty();
}

void* queue_of(void* stream) { return number(stream) <= 2 ? nullptr : stream; }

// Runs the work whose waits are over.
void run_ready() {
  for (bool has_run = true; has_run;) {
    has_run = false;
    for (auto& [stream, queue] : state().queues)
      for (; !queue.empty() && queue.front().is_ready(); has_run = true) {
        queue.front().run();
        queue.pop_front();
      }
  }
}

bool always() { return true; }

void enqueue(void* stream, Task task) {
  const auto capture = state().capturing.find(stream);
  if (capture != state().capturing.end()) {
    capture->second.work.push_back(std::move(task));
    return;
  }
  state().queues[queue_of(stream)].push_back(std::move(task));
  run_ready();
}

// Returns whether a stream, or any stream if `all`, has work that waits.
bool has_work(void* stream, bool all) {
  const std::lock_guard<std::recursive_mutex> guard(state().mutex);
  run_ready();
  for (const auto& [each, queue] : state().queues)
    if ((all || each == queue_of(stream)) && !queue.empty()) return true;
  return false;
}

// Waits until a stream has room for one more call, while other threads may go on.
void wait_for_room(void* stream) {
  const size_t depth = static_cast<size_t>(number_of("FAKE_CUDA_DEPTH", 0));
  for (bool has_room = depth == 0; !has_room;) {
    {
      const std::lock_guard<std::recursive_mutex> guard(state().mutex);
      run_ready();
      has_room = state().queues[queue_of(stream)].size() < depth;
    }
    if (!has_room) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void log(const char* call, const std::vector<uint64_t>& arguments = {}) {
  const char* path = getenv("FAKE_CUDA_LOG");
  FILE* file = path != nullptr ? fopen(path, "a") : nullptr;
  if (file == nullptr) return;
  fprintf(file, "%d %s", gettid(), call);
  for (const uint64_t argument : arguments) fprintf(file, " %llu", static_cast<unsigned long long>(argument));
  fputs("\n", file);
  fclose(file);
}

// Returns the words in the parameters of a kernel, of which some are addresses.
std::vector<uintptr_t> words_of(const std::vector<std::vector<char>>& parameters) {
  std::vector<uintptr_t> words;
  for (const std::vector<char>& value : parameters)
    for (size_t at = 0; at + sizeof(uintptr_t) <= value.size(); at += sizeof(uintptr_t)) {
      words.emplace_back();
      memcpy(&words.back(), value.data() + at, sizeof(uintptr_t));
    }
  return words;
}

bool is_stuck() { return number_of("FAKE_CUDA_STUCK", 0) != 0; }

int new_memory(void** made, size_t nbytes, Kind kind) {
  if (nbytes == 0) return invalid_value;
  *made = make_memory(nbytes, kind);
  return *made != nullptr ? success : 2;
}

}  // namespace

// Calls that need a context fail without one. Any call fails if a test asks for it.
#define ENTER(name)                                                 \
  const std::lock_guard<std::recursive_mutex> guard(state().mutex); \
  if (const int failed = failure_of(name)) return failed;           \
  if (state().initialized != getpid()) return not_initialized;
#define ENTER_CONTEXT(name)                                               \
  ENTER(name)                                                             \
  if (contexts.empty()) return invalid_context;                           \
  if (const int lost = number_of("FAKE_CUDA_LOST", success)) return lost; \
  run_ready();
// Calls that issue work to `stream`, with their arguments.
#define ENTER_ISSUE(name, ...) \
  wait_for_room(stream);       \
  ENTER_CONTEXT(name)          \
  log(name, {__VA_ARGS__});
// Calls that are forbidden while a graph is captured.
#define ENTER_UNSAFE(name) \
  ENTER_CONTEXT(name)      \
  if (is_unsafe_now()) return capture_unsupported;
// Calls that release memory. They may wait, while other threads go on, but do so only if the device is stuck.
#define ENTER_RELEASE(name)                                                     \
  while (is_stuck()) std::this_thread::sleep_for(std::chrono::milliseconds(1)); \
  ENTER_UNSAFE(name)
#define CHECK(condition, otherwise) \
  if (!(condition)) return otherwise;

extern "C" {

static int cu_init(unsigned flags) {
  if (const int failed = failure_of("cuInit")) return failed;
  CHECK(flags == 0, invalid_value)
  CHECK(state().initialized == 0 || state().initialized == getpid(), not_initialized)
  state().initialized = getpid();
  return success;
}
static int cu_driver_get_version(int* version) {
  *version = number_of("FAKE_CUDA_VERSION", 13000);
  return success;
}
static int cu_get_error_string(int error, const char** text) {
  *text = error == 2 ? "out of memory" : "an error of the driver without a GPU";
  return success;
}
static int cu_get_error_name(int, const char** text) {
  *text = "CUDA_ERROR";
  return success;
}

static int cu_device_get_count(int* count) {
  ENTER("cuDeviceGetCount")
  *count = devices;
  return success;
}
static int cu_device_get(int* device, int ordinal) {
  ENTER("cuDeviceGet")
  CHECK(0 <= ordinal && ordinal < devices, invalid_device)
  *device = ordinal;
  return success;
}
static int cu_device_get_name(char* name, int room, int) {
  ENTER("cuDeviceGetName")
  CHECK(room > 32, invalid_value)
  strcpy(name, "GPU of the tests");
  return success;
}
static int cu_device_get_uuid(unsigned char* uuid, int device) {
  ENTER("cuDeviceGetUuid")
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(16 * device + i);
  return success;
}
static int cu_device_get_attribute(int* value, int attribute, int) {
  ENTER("cuDeviceGetAttribute")
  const int capability = number_of("FAKE_CUDA_CAPABILITY", 90);
  const std::map<int, int> values = {{16, multiprocessors},
                                     {41, 1},
                                     {75, capability / 10},
                                     {76, capability % 10},
                                     {99, 1},
                                     {115, number_of("FAKE_CUDA_POOLS", 1)},
                                     {122, number_of("FAKE_CUDA_FLAGS", 1)},
                                     {125, 1}};
  const auto found = values.find(attribute);
  CHECK(found != values.end(), invalid_value)
  *value = found->second;
  return success;
}
static int cu_device_can_access_peer(int* can, int device, int peer) {
  ENTER("cuDeviceCanAccessPeer")
  CHECK(device != peer, invalid_device)
  *can = number_of("FAKE_CUDA_PEERS", 1);
  return success;
}
static int cu_device_primary_ctx_retain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain")
  *context = &primary[device];
  return success;
}
static int cu_ctx_push_current(void* context) {
  ENTER("cuCtxPushCurrent")
  log("cuCtxPushCurrent");
  CHECK(context == &primary[0] || context == &primary[1], invalid_context)
  contexts.push_back(context);
  return success;
}
static int cu_ctx_pop_current(void** context) {
  ENTER_CONTEXT("cuCtxPopCurrent")
  log("cuCtxPopCurrent");
  *context = contexts.back();
  contexts.pop_back();
  return success;
}
static int cu_ctx_get_device(int* device) {
  ENTER_CONTEXT("cuCtxGetDevice")
  *device = static_cast<int>(static_cast<int*>(contexts.back()) - primary);
  return success;
}
static int cu_ctx_get_current(void** context) {
  ENTER("cuCtxGetCurrent")
  *context = contexts.empty() ? nullptr : contexts.back();
  return success;
}
static int cu_ctx_synchronize() {
  {
    ENTER_CONTEXT("cuCtxSynchronize")
    if (ends_captures()) return capture_unsupported;
  }
  while (is_stuck() || has_work(nullptr, true)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return success;
}

static int cu_mem_alloc(void** made, size_t nbytes) {
  ENTER_UNSAFE("cuMemAlloc")
  return new_memory(made, nbytes, Kind::device);
}
static int cu_mem_alloc_async(void** made, size_t nbytes, void* stream) {
  ENTER_CONTEXT("cuMemAllocAsync")
  CHECK(is_stream(stream), invalid_handle)
  return new_memory(made, nbytes, Kind::pooled);
}
static int cu_mem_alloc_managed(void** made, size_t nbytes, unsigned) {
  ENTER_UNSAFE("cuMemAllocManaged")
  return new_memory(made, nbytes, Kind::managed);
}
static int cu_mem_pool_create(void** pool, const PoolProperties* properties) {
  ENTER_CONTEXT("cuMemPoolCreate")
  constexpr int pinned = 1, on_device = 1;
  CHECK(properties->kind == pinned && properties->handles == 0 && properties->place == on_device, invalid_value)
  CHECK(number_of("FAKE_CUDA_POOLS", 1) != 0, not_supported)
  *pool = malloc(1);
  state().pools.insert(*pool);
  return success;
}
static int cu_mem_pool_set_attribute(void* pool, int attribute, const uint64_t* value) {
  ENTER_CONTEXT("cuMemPoolSetAttribute")
  constexpr int release_threshold = 4;
  CHECK(state().pools.count(pool) == 1 && attribute == release_threshold && *value != 0, invalid_value)
  return success;
}
static int cu_mem_pool_trim_to(void* pool, size_t) {
  ENTER_CONTEXT("cuMemPoolTrimTo")
  CHECK(state().pools.count(pool) == 1, invalid_value)
  return success;
}
static int cu_mem_alloc_from_pool_async(void** made, size_t nbytes, void* pool, void* stream) {
  ENTER_CONTEXT("cuMemAllocFromPoolAsync")
  CHECK(is_stream(stream), invalid_handle)
  CHECK(state().pools.count(pool) == 1, invalid_value)
  CHECK(state().capturing.count(stream) == 0, capture_unsupported)
  return new_memory(made, nbytes, Kind::pooled);
}
static int cu_mem_free(uintptr_t address) {
  ENTER_RELEASE("cuMemFree")
  return end_memory(address, false);
}
static int cu_mem_free_async(uintptr_t address, void* stream) {
  ENTER_CONTEXT("cuMemFreeAsync")
  CHECK(is_stream(stream), invalid_handle)
  CHECK(state().capturing.count(stream) == 0, capture_unsupported)
  const auto found = state().memory.find(address);
  CHECK(found != state().memory.end() && found->second.kind == Kind::pooled, invalid_value)
  // Nothing may use it from now on, but work that was issued before still does.
  const Memory memory = found->second;
  state().memory.erase(found);
  enqueue(stream, {always, [address, memory] {
                     require_unused(address, memory.nbytes);
                     munmap(reinterpret_cast<void*>(address), memory.nbytes);
                     close(memory.descriptor);
                   }});
  return success;
}
static int cu_mem_host_alloc(void** made, size_t nbytes, unsigned) {
  ENTER_UNSAFE("cuMemHostAlloc")
  return new_memory(made, nbytes, Kind::pinned);
}
static int cu_mem_free_host(void* address) {
  ENTER_RELEASE("cuMemFreeHost")
  return end_memory(number(address), false);
}

static int cu_mem_host_register(void* address, size_t nbytes, unsigned flags) {
  ENTER_UNSAFE("cuMemHostRegister")
  // Whole pages, mapped for the device.
  CHECK(number(address) % 4096 == 0 && nbytes % 4096 == 0 && nbytes != 0 && flags == 2, invalid_value)
  CHECK(whole_of(number(address)) == state().memory.end(), already_registered)
  state().memory[number(address)] = {nbytes, -1, Kind::registered};
  return success;
}
static int cu_mem_host_unregister(void* address) {
  ENTER_RELEASE("cuMemHostUnregister")
  const auto found = state().memory.find(number(address));
  CHECK(found != state().memory.end() && found->second.kind == Kind::registered, invalid_value)
  require_unused(found->first, found->second.nbytes);
  state().memory.erase(found);
  return success;
}
static int cu_mem_host_get_device_pointer(void** pointer, void* address, unsigned flags) {
  ENTER_CONTEXT("cuMemHostGetDevicePointer")
  CHECK(flags == 0 && whole_of(number(address)) != state().memory.end(), invalid_value)
  *pointer = address;
  return success;
}

static int cu_ipc_get_mem_handle(Handle* handle, uintptr_t address) {
  ENTER_CONTEXT("cuIpcGetMemHandle")
  const auto found = whole_of(address);
  CHECK(found != state().memory.end() && found->second.kind == Kind::device, invalid_value)
  struct stat about;
  fstat(found->second.descriptor, &about);
  *handle = {getpid(), found->second.descriptor, found->second.nbytes, about.st_ino, {}};
  return success;
}
static int cu_ipc_open_mem_handle(void** opened, Handle handle, unsigned flags) {
  ENTER_UNSAFE("cuIpcOpenMemHandle")
  CHECK(flags == 1, invalid_value)  // peer access is enabled on first use
  CHECK(handle.process != getpid(), invalid_context)
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.descriptor);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat about;
  CHECK(descriptor >= 0 && fstat(descriptor, &about) == 0 && about.st_ino == handle.inode, invalid_handle)
  *opened = map_aligned(descriptor, handle.nbytes);
  state().memory[number(*opened)] = {handle.nbytes, descriptor, Kind::opened};
  return success;
}
static int cu_ipc_close_mem_handle(uintptr_t address) {
  ENTER_RELEASE("cuIpcCloseMemHandle")
  return end_memory(address, true);
}

static int cu_stream_create(void** stream, unsigned flags) {
  ENTER_CONTEXT("cuStreamCreate")
  CHECK(flags == 1, invalid_value)  // it does not synchronise with the default stream
  std::vector<void*>& ended = state().ended_streams;
  *stream = ended.empty() ? &state().stream_handles.emplace_back() : ended.back();
  if (!ended.empty()) ended.pop_back();
  state().streams.insert(*stream);
  return success;
}
static int cu_stream_destroy(void* stream) {
  ENTER_CONTEXT("cuStreamDestroy")
  CHECK(is_stream(stream) && state().streams.erase(stream) == 1, invalid_handle)
  state().ended_streams.push_back(stream);
  return success;
}
static int cu_stream_synchronize(void* stream) {
  while (is_stuck() || has_work(stream, false)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ENTER_UNSAFE("cuStreamSynchronize")
  return is_stream(stream) ? success : invalid_handle;
}
static int cu_stream_is_capturing(void* stream, int* status) {
  ENTER_CONTEXT("cuStreamIsCapturing")
  CHECK(is_stream(stream), invalid_handle)
  *status = state().capturing.count(stream) != 0 ? 1 : 0;
  return success;
}
static int cu_stream_begin_capture(void* stream, int mode) {
  ENTER_CONTEXT("cuStreamBeginCapture")
  CHECK(state().streams.count(stream) == 1, capture_unsupported)
  state().capturing[stream] = {std::this_thread::get_id(), mode, true};
  return success;
}
static int cu_stream_end_capture(void* stream, void** graph) {
  ENTER_CONTEXT("cuStreamEndCapture")
  *graph = nullptr;
  const auto found = state().capturing.find(stream);
  CHECK(found != state().capturing.end(), invalid_value)
  const Capture capture = found->second;
  state().capturing.erase(found);
  CHECK(capture.is_valid, capture_invalidated)
  *graph = malloc(1);
  state().graphs[*graph] = capture.work;
  return success;
}
static int cu_graph_instantiate(void** executable, void* graph, uint64_t flags) {
  ENTER_UNSAFE("cuGraphInstantiate")
  CHECK(state().graphs.count(graph) != 0, invalid_handle)
  CHECK(flags == 0, invalid_value)
  *executable = malloc(1);
  state().graphs[*executable] = state().graphs[graph];
  return success;
}
static int cu_graph_destroy(void* graph) {
  ENTER_CONTEXT("cuGraphDestroy")
  CHECK(state().graphs.erase(graph) == 1, invalid_handle)
  free(graph);
  return success;
}
static int cu_graph_launch(void* graph, void* stream) {
  ENTER_ISSUE("cuGraphLaunch", number(graph), number(stream))
  CHECK(state().graphs.count(graph) != 0 && is_stream(stream), invalid_handle)
  for (const Task& task : state().graphs[graph]) enqueue(stream, task);
  return success;
}
static int cu_thread_exchange_stream_capture_mode(int* mode) {
  CHECK(0 <= *mode && *mode <= CaptureMode::relaxed, invalid_value)
  std::swap(*mode, capture_mode);
  return success;
}
static int cu_stream_wait_event(void* stream, void* event, unsigned) {
  ENTER_ISSUE("cuStreamWaitEvent", number(stream), number(event))
  CHECK(is_stream(stream) && state().events.count(event) != 0, invalid_handle)
  CHECK(state().capturing.count(stream) == 0, capture_isolation)
  const auto records = state().events[event].records;
  enqueue(stream, {[records, bound = records->issued] { return records->happened >= bound; }, [] {}});
  return success;
}
static int cu_stream_write_value(void* stream, uintptr_t address, uint64_t value, unsigned flags) {
  ENTER_ISSUE("cuStreamWriteValue64", number(stream), address, value, flags)
  CHECK(is_stream(stream), invalid_handle)
  CHECK(covers(address, 8) && address % 8 == 0 && flags == 0, invalid_value)
  const auto write = [=] { __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELEASE); };
  enqueue(stream, {always, write, {address}});
  return success;
}
static int cu_stream_wait_value(void* stream, uintptr_t address, uint64_t value, unsigned flags) {
  ENTER_ISSUE("cuStreamWaitValue64", number(stream), address, value, flags)
  CHECK(is_stream(stream), invalid_handle)
  CHECK(covers(address, 8) && address % 8 == 0 && flags == 0, invalid_value)
  // As the driver does, by a comparison that ignores overflows.
  const auto is_reached = [=] {
    const uint64_t now = __atomic_load_n(reinterpret_cast<uint64_t*>(address), __ATOMIC_ACQUIRE);
    return static_cast<int64_t>(now - value) >= 0;
  };
  enqueue(stream, {is_reached, [] {}, {address}});
  return success;
}

static int cu_event_create(void** event, unsigned flags) {
  ENTER_CONTEXT("cuEventCreate")
  *event = malloc(1);
  state().events[*event] = Event{flags, false};
  return success;
}
static int cu_event_destroy(void* event) {
  ENTER_CONTEXT("cuEventDestroy")
  CHECK(state().events.erase(event) == 1, invalid_handle)
  free(event);
  return success;
}
static int cu_event_record(void* event, void* stream) {
  ENTER_ISSUE("cuEventRecord", number(event), number(stream))
  CHECK(is_stream(stream) && state().events.count(event) != 0, invalid_handle)
  if (state().capturing.count(stream) != 0) return success;
  const auto records = state().events[event].records;
  enqueue(stream, {always, [records, number = ++records->issued] { records->happened = number; }});
  return success;
}
// Records an event behind the work of all streams. A stream that is captured forbids that, and its graph is lost.
static int cu_ctx_record_event(void* context, void* event) {
  ENTER_CONTEXT("cuCtxRecordEvent")
  CHECK(context == contexts.back() && state().events.count(event) != 0, invalid_handle)
  if (ends_captures()) return capture_unsupported;
  const auto records = state().events[event].records;
  const uint64_t number = ++records->issued;
  const auto streams = std::make_shared<size_t>(0);
  for (const auto& [stream, queue] : state().queues) *streams += !queue.empty();
  if (*streams == 0) records->happened = number;
  for (auto& [stream, queue] : state().queues)
    if (!queue.empty())
      queue.push_back({always, [=] {
                         if (--*streams == 0) records->happened = number;
                       }});
  return success;
}
static int cu_event_query(void* event) {
  ENTER_UNSAFE("cuEventQuery")
  CHECK(state().events.count(event) != 0, invalid_handle)
  const Records& records = *state().events[event].records;
  return is_stuck() || records.happened < records.issued ? not_ready : success;
}
static int cu_event_synchronize(void* event) {
  int result = cu_event_query(event);
  for (; result == not_ready; result = cu_event_query(event)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return result;
}
static int cu_event_elapsed_time(float* milliseconds, void* from, void* to) {
  ENTER_CONTEXT("cuEventElapsedTime")
  for (void* event : {from, to}) {
    CHECK(state().events.count(event) != 0, invalid_handle)
    CHECK((state().events[event].flags & 2) == 0, invalid_handle)  // it records no times
  }
  *milliseconds = 0.5f;
  return success;
}
static int cu_ipc_get_event_handle(Handle* handle, void* event) {
  ENTER_CONTEXT("cuIpcGetEventHandle")
  constexpr unsigned without_times = 2, for_processes = 4;
  const auto found = state().events.find(event);
  CHECK(found != state().events.end() && found->second.flags == (without_times | for_processes), invalid_handle)
  *handle = {getpid(), -1, 0, number(event), {}};
  return success;
}
static int cu_ipc_open_event_handle(void** event, Handle handle) {
  ENTER_CONTEXT("cuIpcOpenEventHandle")
  CHECK(handle.process != getpid(), invalid_context)
  CHECK(handle.descriptor == -1, invalid_handle)
  *event = malloc(1);
  state().events[*event] = Event{0, true};
  return success;
}

static int cu_memcpy_async(uintptr_t dst, uintptr_t src, size_t nbytes, void* stream) {
  ENTER_ISSUE("cuMemcpyAsync", dst, src, nbytes, number(stream))
  CHECK(is_stream(stream), invalid_handle)
  CHECK(covers(dst, nbytes) && covers(src, nbytes), invalid_value)
  const auto copy = [=] { memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes); };
  enqueue(stream, {always, copy, {dst, src}});
  return success;
}

static int cu_pointer_get_attributes(unsigned count, const int* attributes, void** values, uintptr_t address) {
  ENTER("cuPointerGetAttributes")
  const auto found = whole_of(address);
  const bool known = found != state().memory.end();
  const Kind kind = known ? found->second.kind : Kind::pinned;
  for (unsigned i = 0; i < count; ++i) {
    const auto set = [&](auto value) { memcpy(values[i], &value, sizeof value); };
    switch (attributes[i]) {
      case 2:
        set(!known ? 0 : kind == Kind::pinned ? 1 : 2);
        break;  // MEMORY_TYPE
      case 8:
        set(known && kind == Kind::managed);
        break;  // IS_MANAGED
      case 9:
        set(known && kind != Kind::pinned ? 0 : -2);
        break;  // DEVICE_ORDINAL
      case 10:
        set(kind == Kind::device || kind == Kind::opened);
        break;  // IS_LEGACY_CUDA_IPC_CAPABLE
      case 11:
        set(known ? found->first : uintptr_t{0});
        break;  // RANGE_START_ADDR
      case 12:
        set(known ? found->second.nbytes : size_t{0});
        break;  // RANGE_SIZE
      case 17:
        set(kind == Kind::pooled ? uintptr_t{1} : uintptr_t{0});
        break;  // MEMPOOL_HANDLE
      default:
        return invalid_value;
    }
  }
  return success;
}

static int cu_module_load_data(void** module, const void* image) {
  ENTER_UNSAFE("cuModuleLoadData")
  CHECK(memcmp(image, "\177ELF", 4) == 0 || memcmp(image, "//", 2) == 0, invalid_image)
  static char loaded;  // functions are found by their names alone
  *module = &loaded;
  state().modules.insert(*module);
  return success;
}
static int cu_module_get_function(void** function, void* module, const char* name) {
  ENTER_UNSAFE("cuModuleGetFunction")
  CHECK(state().modules.count(module) == 1, invalid_handle)
  const char* listed = getenv("FAKE_CUDA_KERNELS");
  std::string libraries = listed != nullptr ? listed : "";
  for (char* rest = libraries.data(); char* path = strtok_r(rest, ":", &rest);) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    *function = library != nullptr ? dlsym(library, (std::string(name) + "_on_host").c_str()) : nullptr;
    if (*function != nullptr) {
      const void* sizes = dlsym(library, (std::string(name) + "_sizes_of_parameters").c_str());
      const void* threads = dlsym(library, (std::string(name) + "_threads").c_str());
      state().functions[*function] = {name, *static_cast<const size_t* const*>(sizes),
                                      *static_cast<const uint32_t*>(threads)};
      return success;
    }
  }
  return not_found;
}
// Loads the code of a kernel, as its first launch does otherwise.
static int cu_func_load(void* function) {
  ENTER_UNSAFE("cuFuncLoad")
  CHECK(state().functions.count(function) == 1, invalid_handle)
  state().functions[function].is_loaded = true;
  log("cuFuncLoad");
  return success;
}
static int cu_occupancy_max_active_blocks_per_multiprocessor(int* blocks, void* function, int threads, size_t) {
  ENTER_UNSAFE("cuOccupancyMaxActiveBlocksPerMultiprocessor")
  CHECK(state().functions.count(function) == 1, invalid_handle)
  CHECK(static_cast<unsigned>(threads) == state().functions[function].threads, invalid_value)
  *blocks = blocks_of_multiprocessor;
  return success;
}
static int cu_launch_kernel(void* function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty,
                            unsigned tz, unsigned shared, void* stream, void** parameters, void** extra) {
  wait_for_room(stream);
  ENTER_CONTEXT("cuLaunchKernel")
  CHECK(state().functions.count(function) == 1 && is_stream(stream), invalid_handle)
  if (!std::exchange(state().functions[function].is_loaded, true) && is_unsafe_now()) return capture_unsupported;
  CHECK(0 < blocks && blocks <= multiprocessors * blocks_of_multiprocessor && y == 1 && z == 1, invalid_value)
  CHECK(threads == state().functions[function].threads && ty == 1 && tz == 1, invalid_value)
  CHECK(shared == 0 && extra == nullptr, invalid_value)
  std::vector<std::vector<char>> values;  // those of the caller end with this call
  std::vector<uint64_t> logged = {number(function), blocks, number(stream)};
  for (const size_t* size = state().functions[function].sizes; *size != 0; ++size) {
    const char* value = static_cast<const char*>(parameters[values.size()]);
    values.emplace_back(value, value + *size);
    for (const char byte : values.back()) logged.push_back(static_cast<unsigned char>(byte));
  }
  log("cuLaunchKernel", logged);
  const auto run = [=]() mutable {
    std::vector<void*> addresses;
    for (auto& value : values) addresses.push_back(value.data());
    reinterpret_cast<void (*)(uint32_t, void* const*)>(function)(blocks, addresses.data());
  };
  enqueue(stream, {always, run, words_of(values)});
  return success;
}

int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status);

}  // extern "C"

namespace {

template <class Function>
void* untyped(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*>& calls() {
  static const std::map<std::string, void*> table = {
      {"cuInit", untyped(cu_init)},
      {"cuDriverGetVersion", untyped(cu_driver_get_version)},
      {"cuGetErrorString", untyped(cu_get_error_string)},
      {"cuGetErrorName", untyped(cu_get_error_name)},
      {"cuGetProcAddress", untyped(cuGetProcAddress_v2)},
      {"cuDeviceGetCount", untyped(cu_device_get_count)},
      {"cuDeviceGet", untyped(cu_device_get)},
      {"cuDeviceGetName", untyped(cu_device_get_name)},
      {"cuDeviceGetUuid", untyped(cu_device_get_uuid)},
      {"cuDeviceGetAttribute", untyped(cu_device_get_attribute)},
      {"cuDeviceCanAccessPeer", untyped(cu_device_can_access_peer)},
      {"cuDevicePrimaryCtxRetain", untyped(cu_device_primary_ctx_retain)},
      {"cuCtxPushCurrent", untyped(cu_ctx_push_current)},
      {"cuCtxPopCurrent", untyped(cu_ctx_pop_current)},
      {"cuCtxGetCurrent", untyped(cu_ctx_get_current)},
      {"cuCtxGetDevice", untyped(cu_ctx_get_device)},
      {"cuCtxRecordEvent", untyped(cu_ctx_record_event)},
      {"cuCtxSynchronize", untyped(cu_ctx_synchronize)},
      {"cuMemAlloc", untyped(cu_mem_alloc)},
      {"cuMemAllocAsync", untyped(cu_mem_alloc_async)},
      {"cuMemAllocManaged", untyped(cu_mem_alloc_managed)},
      {"cuMemFree", untyped(cu_mem_free)},
      {"cuMemFreeAsync", untyped(cu_mem_free_async)},
      {"cuMemPoolCreate", untyped(cu_mem_pool_create)},
      {"cuMemPoolSetAttribute", untyped(cu_mem_pool_set_attribute)},
      {"cuMemPoolTrimTo", untyped(cu_mem_pool_trim_to)},
      {"cuMemAllocFromPoolAsync", untyped(cu_mem_alloc_from_pool_async)},
      {"cuMemHostAlloc", untyped(cu_mem_host_alloc)},
      {"cuMemFreeHost", untyped(cu_mem_free_host)},
      {"cuMemHostRegister", untyped(cu_mem_host_register)},
      {"cuMemHostUnregister", untyped(cu_mem_host_unregister)},
      {"cuMemHostGetDevicePointer", untyped(cu_mem_host_get_device_pointer)},
      {"cuStreamWriteValue64", untyped(cu_stream_write_value)},
      {"cuStreamWaitValue64", untyped(cu_stream_wait_value)},
      {"cuIpcGetMemHandle", untyped(cu_ipc_get_mem_handle)},
      {"cuIpcOpenMemHandle", untyped(cu_ipc_open_mem_handle)},
      {"cuIpcCloseMemHandle", untyped(cu_ipc_close_mem_handle)},
      {"cuStreamCreate", untyped(cu_stream_create)},
      {"cuStreamDestroy", untyped(cu_stream_destroy)},
      {"cuStreamSynchronize", untyped(cu_stream_synchronize)},
      {"cuStreamIsCapturing", untyped(cu_stream_is_capturing)},
      {"cuStreamBeginCapture", untyped(cu_stream_begin_capture)},
      {"cuStreamEndCapture", untyped(cu_stream_end_capture)},
      {"cuGraphInstantiate", untyped(cu_graph_instantiate)},
      {"cuGraphInstantiateWithFlags", untyped(cu_graph_instantiate)},
      {"cuGraphDestroy", untyped(cu_graph_destroy)},
      {"cuGraphExecDestroy", untyped(cu_graph_destroy)},
      {"cuGraphLaunch", untyped(cu_graph_launch)},
      {"cuThreadExchangeStreamCaptureMode", untyped(cu_thread_exchange_stream_capture_mode)},
      {"cuStreamWaitEvent", untyped(cu_stream_wait_event)},
      {"cuEventCreate", untyped(cu_event_create)},
      {"cuEventDestroy", untyped(cu_event_destroy)},
      {"cuEventRecord", untyped(cu_event_record)},
      {"cuEventQuery", untyped(cu_event_query)},
      {"cuEventSynchronize", untyped(cu_event_synchronize)},
      {"cuEventElapsedTime", untyped(cu_event_elapsed_time)},
      {"cuIpcGetEventHandle", untyped(cu_ipc_get_event_handle)},
      {"cuIpcOpenEventHandle", untyped(cu_ipc_open_event_handle)},
      {"cuMemcpyAsync", untyped(cu_memcpy_async)},
      {"cuPointerGetAttributes", untyped(cu_pointer_get_attributes)},
      {"cuModuleLoadData", untyped(cu_module_load_data)},
      {"cuFuncLoad", untyped(cu_func_load)},
      {"cuModuleGetFunction", untyped(cu_module_get_function)},
      {"cuOccupancyMaxActiveBlocksPerMultiprocessor", untyped(cu_occupancy_max_active_blocks_per_multiprocessor)},
      {"cuLaunchKernel", untyped(cu_launch_kernel)},
  };
  return table;
}

}  // namespace

// The binding looks up all functions by this one.
extern "C" int cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
  const auto call = calls().find(name);
  const bool known = call != calls().end();
  *found = known ? call->second : nullptr;
  if (status != nullptr) *status = known ? 0 : 1;
  return known ? success : not_found;
}

extern "C" int cuDriverGetVersion(int* version) { return cu_driver_get_version(version); }
