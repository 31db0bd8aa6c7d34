#include "tagged/mpi_messenger.h"

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <stdexcept>

namespace unisono {
namespace {

constexpr int success = 0;
// MPI has no file descriptor that wakes a thread when a message ends. So a sleeping thread looks after each
// `max_sleep_time`, and may notice the end that much later. To avoid this for short waits, a thread yields its core
// `mpi_yields_before_sleep` times, which takes about a millisecond, before it sleeps.
constexpr std::chrono::microseconds max_sleep_time{200};
constexpr std::uint32_t mpi_yields_before_sleep = 1000;
// At least the size of every MPI's MPI_Status.
struct alignas(16) MpiStatus {
  std::byte bytes[128];
};

// Only one thread at a time may enter MPI, whatever the number of messengers.
std::mutex& mpi_mutex() {
  static std::mutex mutex;
  return mutex;
}

template <class Handle>
struct MpiLibrary {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*test)(Handle*, int*, MpiStatus*) = nullptr;
  int (*test_cancelled)(const MpiStatus*, int*) = nullptr;
  int (*get_count)(const MpiStatus*, Handle, int*) = nullptr;
  int (*cancel)(Handle*) = nullptr;
  int (*request_free)(Handle*) = nullptr;
  int (*finalized)(int*) = nullptr;

  explicit MpiLibrary(const std::string& path) : handle_(::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    if (handle_ == nullptr) throw std::runtime_error("the MPI library " + path + " is not loaded");
    find(isend, "MPI_Isend");
    find(irecv, "MPI_Irecv");
    find(test, "MPI_Test");
    find(test_cancelled, "MPI_Test_cancelled");
    find(get_count, "MPI_Get_count");
    find(cancel, "MPI_Cancel");
    find(request_free, "MPI_Request_free");
    find(finalized, "MPI_Finalized");
  }

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    void* symbol = ::dlsym(handle_, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("this MPI has no ") + name);
    std::memcpy(&function, &symbol, sizeof function);
  }

  void* handle_;
};

template <class Handle>
Handle handle_of(std::uintptr_t value) {
  if constexpr (std::is_pointer_v<Handle>)
    return reinterpret_cast<Handle>(value);
  else
    return static_cast<Handle>(value);
}

template <class Handle>
std::uintptr_t value_of(Handle handle) {
  if constexpr (std::is_pointer_v<Handle>)
    return reinterpret_cast<std::uintptr_t>(handle);
  else
    return static_cast<std::uintptr_t>(handle);
}

template <class Handle>
class MpiMessenger final : public Messenger {
 public:
  MpiMessenger(const std::string& library, const MpiHandles& handles)
      : library_(library),
        communicator_(handle_of<Handle>(handles.communicator)),
        byte_(handle_of<Handle>(handles.byte)),
        tags_((handles.most_tag - 1) / tags_of_a_channel * tags_of_a_channel) {}

  const char* name() const override { return "mpi"; }
  //! Empty: peers know each other by their ranks in the communicator.
  std::vector<std::byte> address() override { return {}; }

  Peer connect(std::span<const std::byte> address) override {
    std::int32_t rank = 0;
    if (address.size() != sizeof rank) throw std::runtime_error("the peer's address is not a rank of MPI");
    std::memcpy(&rank, address.data(), sizeof rank);
    return static_cast<Peer>(rank);
  }

  std::uint64_t reserve() override { return Messenger::reserve() % tags_; }

  void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType,
            Transfer& transfer) override {
    Handle request{};
    const std::lock_guard lock(mpi_mutex());
    const bool begun = is_usable() && library_.isend(data, static_cast<int>(nbytes), byte_, static_cast<int>(peer),
                                                     static_cast<int>(tag), communicator_, &request) == success;
    begin(transfer, begun, request, false);
  }

  void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType,
               Transfer& transfer) override {
    Handle request{};
    const std::lock_guard lock(mpi_mutex());
    const bool begun = is_usable() && library_.irecv(data, static_cast<int>(nbytes), byte_, static_cast<int>(peer),
                                                     static_cast<int>(tag), communicator_, &request) == success;
    begin(transfer, begun, request, true);
  }

  void test(Transfer& transfer) override {
    if (!transfer.pending()) return;
    auto request = handle_of<Handle>(transfer.request);
    MpiStatus status{};
    int ended = 0;
    const std::lock_guard lock(mpi_mutex());
    const bool well = is_usable() && library_.test(&request, &ended, &status) == success;
    if (well && ended == 0) return;
    transfer.state = well && was_moved(transfer, status) ? Transfer::State::done : Transfer::State::failed;
  }

  void cancel(Transfer& transfer) override {
    // Only receives are cancelled. MPI need not cancel a send, and may wait for the receiver to find out.
    if (!transfer.receives) return;
    auto request = handle_of<Handle>(transfer.request);
    const std::lock_guard lock(mpi_mutex());
    if (is_usable()) library_.cancel(&request);
  }

  // An ended send continues by itself, and MPI_Finalize waits for it.
  void flush(Peer, Transfer& transfer) override { transfer.state = Transfer::State::done; }

  void abandon_transfer(Transfer& transfer) override {
    auto request = handle_of<Handle>(transfer.request);
    const std::lock_guard lock(mpi_mutex());
    if (is_usable()) library_.request_free(&request);
    transfer.state = Transfer::State::failed;
  }

  bool prepare_sleep(std::vector<pollfd>&) override { return true; }
  std::chrono::microseconds max_sleep() const override { return max_sleep_time; }
  std::uint32_t extra_yields() const override { return mpi_yields_before_sleep; }

 private:
  // Whether MPI may be called. After MPI_Finalize, which the program may call at any time, MPI would end the process.
  bool is_usable() const {
    int finalized = 0;
    return library_.finalized(&finalized) == success && finalized == 0;
  }

  static void begin(Transfer& transfer, bool begun, Handle request, bool receives) {
    transfer = {};
    transfer.receives = receives;
    transfer.request = value_of(request);
    transfer.state = begun ? Transfer::State::pending : Transfer::State::failed;
  }

  bool was_moved(Transfer& transfer, const MpiStatus& status) const {
    int cancelled = 0;
    int nbytes = 0;
    if (library_.test_cancelled(&status, &cancelled) != success || cancelled != 0) return false;
    if (transfer.receives && library_.get_count(&status, byte_, &nbytes) != success) return false;
    transfer.nbytes = static_cast<std::size_t>(nbytes);
    return true;
  }

  const MpiLibrary<Handle> library_;
  const Handle communicator_;
  const Handle byte_;
  const std::uint64_t tags_;
};

}  // namespace

std::unique_ptr<Messenger> make_mpi_messenger(const std::string& library, const MpiHandles& handles) {
  if (handles.pointers) return std::make_unique<MpiMessenger<void*>>(library, handles);
  return std::make_unique<MpiMessenger<int>>(library, handles);
}

}  // namespace unisono
