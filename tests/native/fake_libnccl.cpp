// NCCL without a GPU, for tests of its callers: a libnccl.so.2 that computes in host memory, between processes.
//
// Device memory is that of the driver's double (fake_libcuda.cpp), which is host memory. A thread of each communicator
// runs its calls in their order; until a call has ended, ncclCommGetAsyncError says "in progress", as NCCL does while
// it sets up a call. The ranks meet in a file of /dev/shm that the unique id names. Each rank has a slot in it: a call
// copies its input there, waits until all ranks have done so, reads what it needs from the slots, and waits until all
// ranks have read. A group of sends and receives is one such call, in which all ranks take part.
//
// A communicator whose configuration says that it blocks, as CuPy's does, waits in each call until the call has ended.
//
// It checks its caller: no call is made while an earlier one is in progress, and the context of the communicator is
// current in each call, because NCCL uses the current device. Reductions are of bytes, and of integers
// and floats of 32 and 64 bits.
//
// FAKE_NCCL_VERSION is its version, such as 23004 for 2.30.4. To the file FAKE_NCCL_LOG it appends a line for each
// call: its name and arguments. FAKE_NCCL_FAIL, such as "ncclAllReduce=1", makes calls fail with these codes.

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Result {
  success = 0,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};

constexpr size_t slot_nbytes = 8 << 20;
constexpr int most_ranks = 16;
constexpr size_t item_nbytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct UniqueId {
  char bytes[128];
};

// The first fields of ncclConfig_t.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Shared {
  std::atomic<int> arrived;
  std::atomic<uint64_t> written[most_ranks];
  std::atomic<uint64_t> read[most_ranks];
};

struct Transfer {
  bool is_send;
  std::byte* address;
  size_t nbytes;
  int peer;
};

Result failure_of(const char* name) {
  const char* all = getenv("FAKE_NCCL_FAIL");
  const std::string sought = std::string(name) + "=";
  const char* found = all == nullptr ? nullptr : strstr(all, sought.c_str());
  return found == nullptr ? success : static_cast<Result>(atoi(found + sought.size()));
}

template <class... Arguments>
void log_call(const char* name, Arguments... arguments) {
  const char* path = getenv("FAKE_NCCL_LOG");
  if (path == nullptr) return;
  std::string line = name;
  ((line += " " + std::to_string(arguments)), ...);
  line += "\n";
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file >= 0 && write(file, line.data(), line.size()) < 0) perror(path);
  close(file);
}

// The current context of the driver's double; null if there is none.
void* current_context() {
  using Lookup = int (*)(const char*, void**, int, uint64_t, int*);
  using Current = int (*)(void**);
  static const auto lookup = reinterpret_cast<Lookup>(dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2"));
  void* current = nullptr;
  if (lookup == nullptr || lookup("cuCtxGetCurrent", &current, 12000, 0, nullptr) != 0) abort();
  void* context = nullptr;
  return reinterpret_cast<Current>(current)(&context) == 0 ? context : nullptr;
}

class Comm {
 public:
  // Whether the context of this communicator is current.
  bool is_current() const { return context_ == current_context(); }

  Comm(int size, int rank, const std::string& path, bool blocks)
      : size_(size), rank_(rank), path_(path), blocks_(blocks) {
    const size_t nbytes = sizeof(Shared) + slot_nbytes * static_cast<size_t>(size);
    const int file = open(path.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(nbytes)) != 0) abort();
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) abort();
    shared_ = static_cast<Shared*>(memory);
    nbytes_ = nbytes;
    enqueue([this] {
      if (shared_->arrived.fetch_add(1) + 1 == size_) unlink(path_.c_str());
      wait_for([this] { return shared_->arrived.load() == size_; });
    });
    thread_ = std::thread([this] { run(); });
    ended_call();
  }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  ~Comm() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
    while (waiting_.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    unlink(path_.c_str());
    munmap(shared_, nbytes_);
  }

  int size() const { return size_; }
  int rank() const { return rank_; }

  Result state() {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && !running_ ? success : in_progress;
  }

  // One call: `input` goes to this rank's slot, and `read` sees the slots of all.
  Result call(std::function<void(std::byte*)> input, std::function<void()> read) {
    if (state() != success || !is_current()) return invalid_usage;
    enqueue([this, input, read] {
      ++calls_;
      input(slot(rank_));
      shared_->written[rank_].store(calls_);
      wait_for([this] { return all(shared_->written); });
      if (!is_over()) read();
      shared_->read[rank_].store(calls_);
      wait_for([this] { return all(shared_->read); });
    });
    return ended_call();
  }

  // The result of a call on the host: a communicator that blocks waits until all ranks have made it, or another thread
  // aborts it.
  Result ended_call() {
    if (!blocks_) return in_progress;
    ++waiting_;
    wait_for([this] { return state() == success; });
    const Result result = is_over() ? remote_error : success;
    --waiting_;
    return result;
  }

  std::byte* slot(int rank) {
    return reinterpret_cast<std::byte*>(shared_ + 1) + slot_nbytes * static_cast<size_t>(rank);
  }

  bool is_over() const { return ended_.load(); }

 private:
  void enqueue(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
      if (ended_) return;
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      lock.unlock();
      work();
      lock.lock();
      running_ = false;
    }
  }

  bool all(const std::atomic<uint64_t>* counters) const {
    for (int rank = 0; rank < size_; ++rank)
      if (counters[rank].load() < calls_) return false;
    return true;
  }

  template <class Condition>
  void wait_for(Condition condition) {
    while (!condition() && !is_over()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  void* const context_ = current_context();
  int size_, rank_;
  std::string path_;
  bool blocks_;
  Shared* shared_ = nullptr;
  size_t nbytes_ = 0;
  uint64_t calls_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool running_ = false;
  std::atomic<bool> ended_{false};
  std::atomic<int> waiting_{0};  // the threads in `ended_call`
  std::thread thread_;
};

thread_local int group_depth = 0;
thread_local std::vector<Transfer> group;
thread_local Comm* group_comm = nullptr;

template <class T>
void combine(std::byte* to, const std::byte* from, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    memcpy(&a, to + i * sizeof(T), sizeof(T));
    memcpy(&b, from + i * sizeof(T), sizeof(T));
    const T c = op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b;
    memcpy(to + i * sizeof(T), &c, sizeof(T));
  }
}

template <class T>
void divide(std::byte* to, size_t count, int size) {
  for (size_t i = 0; i < count; ++i) {
    T a;
    memcpy(&a, to + i * sizeof(T), sizeof(T));
    a = static_cast<T>(a / static_cast<T>(size));
    memcpy(to + i * sizeof(T), &a, sizeof(T));
  }
}

using Combine = void (*)(std::byte*, const std::byte*, size_t, int);
using Divide = void (*)(std::byte*, size_t, int);
const Combine combines[] = {combine<int8_t>,   combine<uint8_t>, combine<int32_t>, combine<uint32_t>, combine<int64_t>,
                            combine<uint64_t>, nullptr,          combine<float>,   combine<double>};
const Divide divides[] = {divide<int8_t>,   divide<uint8_t>, divide<int32_t>, divide<uint32_t>, divide<int64_t>,
                          divide<uint64_t>, nullptr,         divide<float>,   divide<double>};
constexpr int average = 4;

bool is_reduced(int type, int op) {
  return type >= 0 && type < 9 && combines[type] != nullptr && op >= 0 && op <= average;
}

// Combines the elements from `first` on of all slots into `to`.
void reduce_slots(Comm* comm, std::byte* to, size_t first, size_t count, int type, int op) {
  const size_t offset = first * item_nbytes[type];
  memcpy(to, comm->slot(0) + offset, count * item_nbytes[type]);
  for (int rank = 1; rank < comm->size(); ++rank) combines[type](to, comm->slot(rank) + offset, count, op);
  if (op == average) divides[type](to, count, comm->size());
}

std::function<void(std::byte*)> copy_of(const void* source, size_t nbytes) {
  return [source, nbytes](std::byte* slot) { memcpy(slot, source, nbytes); };
}

void nothing(std::byte*) {}

bool fits(size_t nbytes) { return nbytes <= slot_nbytes; }

Result exchange(Comm* comm, const std::vector<Transfer>& transfers) {
  const size_t part = slot_nbytes / static_cast<size_t>(comm->size());
  for (const Transfer& each : transfers)
    if (each.nbytes > part || each.peer < 0 || each.peer >= comm->size()) return invalid_argument;
  const auto send = [transfers, part](std::byte* slot) {
    for (const Transfer& each : transfers)
      if (each.is_send) memcpy(slot + part * static_cast<size_t>(each.peer), each.address, each.nbytes);
  };
  const auto receive = [comm, transfers, part] {
    for (const Transfer& each : transfers)
      if (!each.is_send)
        memcpy(each.address, comm->slot(each.peer) + part * static_cast<size_t>(comm->rank()), each.nbytes);
  };
  return comm->call(send, receive);
}

Result transfer(const char* name, bool is_send, void* address, size_t count, int type, int peer, Comm* comm) {
  log_call(name, count, type, peer);
  if (group_depth == 0 || type < 0 || type >= 12) return invalid_usage;
  group_comm = comm;
  group.push_back({is_send, static_cast<std::byte*>(address), count * item_nbytes[type], peer});
  return success;
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) {
  const char* text = getenv("FAKE_NCCL_VERSION");
  *version = text == nullptr ? 23004 : atoi(text);
  return success;
}

const char* ncclGetErrorString(Result result) {
  return result == invalid_usage ? "invalid usage" : "an error of the double";
}
const char* ncclGetLastError(Comm*) { return ""; }

Result ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  snprintf(id->bytes, sizeof id->bytes, "/dev/shm/fake-nccl-%d-%lld", getpid(), static_cast<long long>(now));
  return failure_of("ncclGetUniqueId");
}

Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, const Config* config) {
  const bool blocks = config == nullptr || config->blocking != 0;
  log_call("ncclCommInitRankConfig", size, rank, blocks);
  if (const Result failure = failure_of("ncclCommInitRankConfig"); failure != success) return failure;
  if (size > most_ranks) return invalid_argument;
  if (current_context() == nullptr) return invalid_usage;
  *comm = new Comm(size, rank, id.bytes, blocks);
  return blocks ? success : in_progress;
}

// CuPy is linked to these, and nothing calls them.
Result ncclBcast() { return internal_error; }
Result ncclCommCount() { return internal_error; }
Result ncclCommCuDevice() { return internal_error; }
Result ncclCommInitAll() { return internal_error; }
Result ncclCommSplit() { return internal_error; }
Result ncclCommUserRank() { return internal_error; }

Result ncclCommGetAsyncError(Comm* comm, int* result) {
  if (!comm->is_current()) return invalid_usage;
  *result = comm->state();
  if (const Result failure = failure_of("async"); failure != success) *result = failure;
  return success;
}

Result ncclCommFinalize(Comm*) {
  log_call("ncclCommFinalize");
  return success;
}

Result ncclCommDestroy(Comm* comm) {
  if (!comm->is_current()) return invalid_usage;
  log_call("ncclCommDestroy");
  delete comm;
  return success;
}

Result ncclCommAbort(Comm* comm) {
  if (!comm->is_current()) return invalid_usage;
  log_call("ncclCommAbort");
  delete comm;
  return success;
}

Result ncclGroupStart() {
  ++group_depth;
  return success;
}

Result ncclGroupEnd() {
  if (group_depth == 0) return invalid_usage;
  if (--group_depth != 0 || group.empty()) return success;
  return exchange(std::exchange(group_comm, nullptr), std::exchange(group, {}));
}

Result ncclAllReduce(const void* source, void* target, size_t count, int type, int op, Comm* comm, void*) {
  log_call("ncclAllReduce", count, type, op);
  if (const Result failure = failure_of("ncclAllReduce"); failure != success) return failure;
  if (!is_reduced(type, op) || !fits(count * item_nbytes[type])) return invalid_argument;
  return comm->call(copy_of(source, count * item_nbytes[type]),
                    [=] { reduce_slots(comm, static_cast<std::byte*>(target), 0, count, type, op); });
}

Result ncclReduce(const void* source, void* target, size_t count, int type, int op, int root, Comm* comm, void*) {
  log_call("ncclReduce", count, type, op, root);
  if (!is_reduced(type, op) || !fits(count * item_nbytes[type])) return invalid_argument;
  return comm->call(copy_of(source, count * item_nbytes[type]), [=] {
    if (comm->rank() == root) reduce_slots(comm, static_cast<std::byte*>(target), 0, count, type, op);
  });
}

Result ncclReduceScatter(const void* source, void* target, size_t count, int type, int op, Comm* comm, void*) {
  log_call("ncclReduceScatter", count, type, op);
  const size_t whole = count * static_cast<size_t>(comm->size());
  if (!is_reduced(type, op) || !fits(whole * item_nbytes[type])) return invalid_argument;
  return comm->call(copy_of(source, whole * item_nbytes[type]), [=] {
    reduce_slots(comm, static_cast<std::byte*>(target), count * static_cast<size_t>(comm->rank()), count, type, op);
  });
}

Result ncclBroadcast(const void* source, void* target, size_t count, int type, int root, Comm* comm, void*) {
  log_call("ncclBroadcast", count, type, root);
  if (type < 0 || type >= 12 || !fits(count * item_nbytes[type])) return invalid_argument;
  const size_t nbytes = count * item_nbytes[type];
  return comm->call(comm->rank() == root ? copy_of(source, nbytes) : nothing,
                    [=] { memcpy(target, comm->slot(root), nbytes); });
}

Result ncclAllGather(const void* source, void* target, size_t count, int type, Comm* comm, void*) {
  log_call("ncclAllGather", count, type);
  if (type < 0 || type >= 12 || !fits(count * item_nbytes[type])) return invalid_argument;
  const size_t nbytes = count * item_nbytes[type];
  return comm->call(copy_of(source, nbytes), [=] {
    for (int rank = 0; rank < comm->size(); ++rank)
      memcpy(static_cast<std::byte*>(target) + nbytes * static_cast<size_t>(rank), comm->slot(rank), nbytes);
  });
}

Result ncclSend(const void* source, size_t count, int type, int peer, Comm* comm, void*) {
  return transfer("ncclSend", true, const_cast<void*>(source), count, type, peer, comm);
}

Result ncclRecv(void* target, size_t count, int type, int peer, Comm* comm, void*) {
  return transfer("ncclRecv", false, target, count, type, peer, comm);
}
}
