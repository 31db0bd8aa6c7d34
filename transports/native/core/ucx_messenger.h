// Tagged messages by UCX.
//
// Memory of a GPU is given to UCX as it is, where UCX knows it. What UCX does by CUDA then, it does in the thread that
// has entered it, and where it asks its events there must be a context: so the device's is current from then on.
//
// The library is the one that a Python package of UCX has loaded, and so is its worker; its functions are looked up by
// name, and the few structs that they take are declared here as UCX documents them, so that nothing of UCX is needed to
// build this. Endpoints are made here, from the addresses of workers, and without UCX's error handling: that keeps UCX
// from shared memory, and channels know of lost peers by themselves. They are never closed, nor is the worker: what is
// left of either at the end of a process goes with it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_context.h"
#include "messenger.h"

namespace unisono {

struct UcxLibrary;

class UcxMessenger final : public Messenger {
 public:
  // `library` is the path of libucp, and `context` and `worker` are handles of its, which must stay until the process
  // ends. Throws std::runtime_error if that is no UCX that this can use.
  UcxMessenger(const std::string& library, std::uintptr_t context, std::uintptr_t worker);
  ~UcxMessenger() override;

  const char* name() const override { return "ucx"; }
  std::vector<std::byte> address() override;
  Peer connect(std::span<const std::byte> address) override;
  bool knows(MemoryType memory) const override { return (memory_types_ >> static_cast<unsigned>(memory) & 1) != 0; }
  void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
            Ticket& ticket) override;
  void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
               Ticket& ticket) override;
  void test(Ticket& ticket) override;
  void cancel(Ticket& ticket) override;
  void flush(Peer peer, Ticket& ticket) override;
  void forsake(Ticket& ticket) override;
  bool prepare_sleep(std::vector<pollfd>& descriptors) override;
  std::chrono::microseconds doze() const override;
  std::uint32_t patience() const override;

  std::string version() const;
  // What UCX has chosen to carry messages to a peer, in its words, such as "posix/memory, tcp/eth0"; empty if it does
  // not tell.
  std::string carriers(Peer peer);

 private:
  // Held by whoever is in the library; with memory of a device, if it is about that.
  class Entry {
   public:
    explicit Entry(UcxMessenger& messenger, const void* on_device = nullptr)
        : lock_(messenger.mutex_), current_(messenger.cuda_.adopt(on_device)) {}

   private:
    const std::lock_guard<std::mutex> lock_;
    const CudaContext::Current current_;
  };

  static void begin(Ticket& ticket, void* request, bool receives);

  std::unique_ptr<const UcxLibrary> library_;
  void* worker_;
  std::uint64_t memory_types_;  // a bit for each that UCX knows
  CudaContext cuda_;            // guarded by the mutex
  int event_descriptor_ = -1;
  std::atomic<bool> moved_{false};  // something, since the worker was armed
  std::mutex mutex_;
  std::map<std::string, void*> peers_;  // by address
};

}  // namespace unisono
