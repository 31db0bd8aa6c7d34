// Tagged messages by UCX.
//
// Messages in memory of a GPU are passed to UCX as they are, if UCX supports that. UCX then calls CUDA in the thread
// that has entered it, and some of these calls need a current context. So the context of that device is made current
// from then on.
//
// A Python package of UCX has loaded the library and created the worker. Functions are looked up by name, and the few
// structs that they take are declared here as UCX documents them, so the build needs no UCX.
//
// Endpoints are created here from the addresses of workers, without UCX's error handling. With it UCX could not use
// shared memory, and channels detect lost peers themselves. Endpoints and the worker are never closed; they end with
// the process.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/cuda_context.h"
#include "tagged/messenger.h"

namespace unisono {

struct UcxLibrary;

//! The messenger of a UCX worker.
class UcxMessenger final : public Messenger {
 public:
  //! `library` is the path of libucp. `context` and `worker` are its handles, which must stay valid until the process
  //! ends. Throws std::runtime_error if this UCX cannot be used.
  UcxMessenger(const std::string& library, std::uintptr_t context, std::uintptr_t worker);
  ~UcxMessenger() override;

  const char* name() const override { return "ucx"; }
  std::vector<std::byte> address() override;
  Peer connect(std::span<const std::byte> address) override;
  bool supports(MemoryType memory) const override { return (memory_types_ >> static_cast<unsigned>(memory) & 1) != 0; }
  void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
            Transfer& transfer) override;
  void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
               Transfer& transfer) override;
  void test(Transfer& transfer) override;
  void cancel(Transfer& transfer) override;
  void flush(Peer peer, Transfer& transfer) override;
  void abandon_transfer(Transfer& transfer) override;
  bool prepare_sleep(std::vector<pollfd>& descriptors) override;
  std::chrono::microseconds max_sleep() const override;
  std::uint32_t extra_yields() const override;

  //! The version of the loaded UCX.
  std::string version() const;
  //! The transports that UCX has chosen for a peer, in its own words, such as "posix/memory, tcp/eth0"; empty if it
  //! does not say.
  std::string carriers(Peer peer);

 private:
  // A lock held while a thread is in the library. For a message in memory of a device, it makes the device's context
  // current.
  class Entry {
   public:
    explicit Entry(UcxMessenger& messenger, const void* on_device = nullptr)
        : lock_(messenger.mutex_), current_(messenger.cuda_.adopt(on_device)) {}

   private:
    const std::lock_guard<std::mutex> lock_;
    const CudaContext::Current current_;
  };

  static void begin(Transfer& transfer, void* request, bool receives);

  std::unique_ptr<const UcxLibrary> library_;
  void* worker_;
  std::uint64_t memory_types_;  // a bit for each type that UCX supports
  CudaContext cuda_;            // guarded by the mutex
  int event_descriptor_ = -1;
  std::atomic<bool> moved_{false};      // whether anything has moved since the worker was armed
  std::mutex mutex_;                    // held by the one thread that is inside UCX
  std::map<std::string, void*> peers_;  // by address
};

}  // namespace unisono
