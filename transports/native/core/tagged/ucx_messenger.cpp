#include "tagged/ucx_messenger.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

namespace unisono {
namespace {

// From ucs/type/status.h and ucp/api/ucp.h, which promise not to change them.
using Status = int;
constexpr Status status_ok = 0;
constexpr Status status_in_progress = 1;
constexpr Status status_busy = -15;
constexpr Status least_status = -100;
constexpr std::uint64_t ep_param_remote_address = 1U << 0;
constexpr std::uint64_t ep_attr_transports = 1U << 3;
constexpr std::uint32_t op_attr_memory_type = 1U << 6;
constexpr std::uint32_t op_attr_no_immediate_completion = 1U << 16;
constexpr std::uint64_t context_attr_memory_types = 1U << 2;
constexpr std::uint64_t whole_tag = ~std::uint64_t{0};
constexpr unsigned least_minor_version = 11;  // of 1.x: the first with all functions used here

// A mask says which fields of a struct are used, so newer libraries can have more fields.
struct EndpointParams {
  std::uint64_t field_mask;
  const void* address;
  std::byte others[512];
};

struct RequestParam {
  std::uint32_t op_attr_mask;
  std::uint32_t flags;
  void* request;
  void* callback;
  std::uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  std::byte others[204];
};

struct ContextAttributes {
  std::uint64_t field_mask;
  std::size_t request_size;
  int thread_mode;
  std::uint64_t memory_types;
  std::byte others[512];
};

struct TagRecvInfo {
  std::uint64_t sender_tag;
  std::size_t length;
};

struct TransportEntry {
  const char* transport_name;
  const char* device_name;
};

struct EndpointAttributes {
  std::uint64_t field_mask;
  char name[32];
  sockaddr_storage local;
  sockaddr_storage remote;
  TransportEntry* entries;  // memory of the caller
  unsigned entries_count;
  std::size_t entry_nbytes;
  std::byte others[512];
};
constexpr unsigned most_carriers = 16;

bool is_request(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) - 1 <
         static_cast<std::uintptr_t>(static_cast<std::intptr_t>(least_status)) - 1;
}

// UCX is told the type of memory, because its own record of allocations may be incomplete.
RequestParam param_of(MemoryType memory) {
  RequestParam param{};
  if (memory != MemoryType::host) param.op_attr_mask = op_attr_memory_type;
  param.memory_type = static_cast<int>(memory);
  return param;
}

// A sleep is bounded although there are events: a sleeping thread of another communicator may have taken the event.
constexpr std::chrono::microseconds max_sleep_with_events{2000};
constexpr std::chrono::microseconds max_sleep_without_events{200};
// A thread takes as long to wake up as half a megabyte takes to arrive, and the sender gets no event before the end of
// its message. So threads yield often before they sleep.
constexpr std::uint32_t ucx_yields_before_sleep = 1000;

}  // namespace

struct UcxLibrary {
  void* handle = nullptr;
  void (*get_version)(unsigned*, unsigned*, unsigned*) = nullptr;
  Status (*context_query)(void*, void*) = nullptr;
  Status (*worker_get_address)(void*, void**, std::size_t*) = nullptr;
  void (*worker_release_address)(void*, void*) = nullptr;
  unsigned (*worker_progress)(void*) = nullptr;
  Status (*worker_get_efd)(void*, int*) = nullptr;
  Status (*worker_arm)(void*) = nullptr;
  Status (*ep_create)(void*, const void*, void**) = nullptr;
  void* (*ep_flush)(void*, const void*) = nullptr;
  void* (*tag_send)(void*, const void*, std::size_t, std::uint64_t, const void*) = nullptr;
  void* (*tag_recv)(void*, void*, std::size_t, std::uint64_t, std::uint64_t, const void*) = nullptr;
  Status (*recv_test)(void*, void*) = nullptr;
  Status (*check_status)(void*) = nullptr;
  void (*request_cancel)(void*, void*) = nullptr;
  void (*request_free)(void*) = nullptr;
  Status (*ep_query)(void*, void*) = nullptr;
  const char* (*status_string)(Status) = nullptr;
  const char* (*version_string)() = nullptr;

  explicit UcxLibrary(const std::string& path) : handle(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) throw std::runtime_error(std::string("UCX cannot be loaded: ") + ::dlerror());
    find(get_version, "ucp_get_version");
    unsigned major = 0, minor = 0, release = 0;
    get_version(&major, &minor, &release);
    if (major != 1 || minor < least_minor_version)
      throw std::runtime_error("UCX " + std::to_string(major) + "." + std::to_string(minor) +
                               " cannot be used: it must be 1." + std::to_string(least_minor_version) +
                               " or a later 1.x");
    find(context_query, "ucp_context_query");
    find(worker_get_address, "ucp_worker_get_address");
    find(worker_release_address, "ucp_worker_release_address");
    find(worker_progress, "ucp_worker_progress");
    find(worker_get_efd, "ucp_worker_get_efd");
    find(worker_arm, "ucp_worker_arm");
    find(ep_create, "ucp_ep_create");
    find(ep_flush, "ucp_ep_flush_nbx");
    find(tag_send, "ucp_tag_send_nbx");
    find(tag_recv, "ucp_tag_recv_nbx");
    find(recv_test, "ucp_tag_recv_request_test");
    find(check_status, "ucp_request_check_status");
    find(request_cancel, "ucp_request_cancel");
    find(request_free, "ucp_request_free");
    find(ep_query, "ucp_ep_query");
    find(status_string, "ucs_status_string");
    find(version_string, "ucp_get_version_string");
  }
  // The library stays loaded, because it owns abandoned transfers.

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    void* symbol = ::dlsym(handle, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("this UCX has no ") + name);
    std::memcpy(&function, &symbol, sizeof function);
  }
};

UcxMessenger::UcxMessenger(const std::string& library, std::uintptr_t context, std::uintptr_t worker)
    : library_(std::make_unique<UcxLibrary>(library)), worker_(reinterpret_cast<void*>(worker)) {
  if (context == 0 || worker == 0) throw std::runtime_error("UCX has no context or no worker");
  ContextAttributes attributes{};
  attributes.field_mask = context_attr_memory_types;
  const Status status = library_->context_query(reinterpret_cast<void*>(context), &attributes);
  memory_types_ = status == status_ok ? attributes.memory_types : 1U << static_cast<unsigned>(MemoryType::host);
  // A worker that cannot wake a thread has no descriptor.
  if (library_->worker_get_efd(worker_, &event_descriptor_) != status_ok) event_descriptor_ = -1;
}

UcxMessenger::~UcxMessenger() = default;

std::vector<std::byte> UcxMessenger::address() {
  const Entry entry(*this);
  void* address = nullptr;
  std::size_t nbytes = 0;
  const Status status = library_->worker_get_address(worker_, &address, &nbytes);
  if (status != status_ok)
    throw std::runtime_error("UCX cannot report the address of its worker: " +
                             std::string(library_->status_string(status)));
  const auto* bytes = static_cast<const std::byte*>(address);
  std::vector<std::byte> copied(bytes, bytes + nbytes);
  library_->worker_release_address(worker_, address);
  return copied;
}

Messenger::Peer UcxMessenger::connect(std::span<const std::byte> address) {
  const Entry entry(*this);
  const std::string key(reinterpret_cast<const char*>(address.data()), address.size());
  void*& endpoint = peers_[key];
  if (endpoint == nullptr) {
    EndpointParams params{};
    params.field_mask = ep_param_remote_address;
    params.address = address.data();
    const Status status = library_->ep_create(worker_, &params, &endpoint);
    if (status != status_ok) {
      peers_.erase(key);
      throw std::runtime_error(
          "UCX does not reach the other rank with the transports that UCX_TLS and the machines allow (" +
          std::string(library_->status_string(status)) + ")");
    }
  }
  return reinterpret_cast<Peer>(endpoint);
}

std::string UcxMessenger::version() const { return library_->version_string(); }

std::string UcxMessenger::carriers(Peer peer) {
  TransportEntry entries[most_carriers]{};
  EndpointAttributes attributes{};
  attributes.field_mask = ep_attr_transports;
  attributes.entries = entries;
  attributes.entries_count = most_carriers;
  attributes.entry_nbytes = sizeof(TransportEntry);
  const Entry entry(*this);
  if (library_->ep_query(reinterpret_cast<void*>(peer), &attributes) != status_ok) return {};
  std::string carriers;
  for (unsigned i = 0; i < attributes.entries_count; ++i)
    carriers += std::string(i == 0 ? "" : ", ") + entries[i].transport_name + "/" + entries[i].device_name;
  return carriers;
}

void UcxMessenger::begin(Transfer& transfer, void* request, bool receives) {
  transfer = {};
  transfer.receives = receives;
  if (is_request(request)) {
    transfer.request = reinterpret_cast<std::uintptr_t>(request);
    transfer.state = Transfer::State::pending;
  } else {
    transfer.state = request == nullptr ? Transfer::State::done : Transfer::State::failed;
  }
}

void UcxMessenger::send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
                        Transfer& transfer) {
  const RequestParam param = param_of(memory);
  const Entry entry(*this, memory == MemoryType::host ? nullptr : data);
  begin(transfer, library_->tag_send(reinterpret_cast<void*>(peer), data, nbytes, tag, &param), false);
}

// The received length is read from the request, so UCX must return one.
void UcxMessenger::receive(Peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
                           Transfer& transfer) {
  RequestParam param = param_of(memory);
  param.op_attr_mask |= op_attr_no_immediate_completion;
  const Entry entry(*this, memory == MemoryType::host ? nullptr : data);
  begin(transfer, library_->tag_recv(worker_, data, nbytes, tag, whole_tag, &param), true);
}

void UcxMessenger::test(Transfer& transfer) {
  auto* request = reinterpret_cast<void*>(transfer.request);
  const Entry entry(*this);
  if (library_->worker_progress(worker_) != 0) moved_.store(true, std::memory_order_relaxed);
  if (!transfer.pending()) return;
  TagRecvInfo info{};
  const Status status = transfer.receives ? library_->recv_test(request, &info) : library_->check_status(request);
  if (status == status_in_progress) return;
  transfer.nbytes = info.length;
  transfer.state = status == status_ok ? Transfer::State::done : Transfer::State::failed;
  library_->request_free(request);
}

void UcxMessenger::cancel(Transfer& transfer) {
  const Entry entry(*this);
  library_->request_cancel(worker_, reinterpret_cast<void*>(transfer.request));
}

void UcxMessenger::flush(Peer peer, Transfer& transfer) {
  const RequestParam param{};
  const Entry entry(*this);
  begin(transfer, library_->ep_flush(reinterpret_cast<void*>(peer), &param), false);
}

void UcxMessenger::abandon_transfer(Transfer& transfer) {
  const Entry entry(*this);
  library_->request_free(reinterpret_cast<void*>(transfer.request));
  transfer.state = Transfer::State::failed;
}

bool UcxMessenger::prepare_sleep(std::vector<pollfd>& descriptors) {
  if (event_descriptor_ < 0) return true;
  descriptors.push_back({event_descriptor_, POLLIN, 0});
  const Entry entry(*this);
  moved_.store(false, std::memory_order_relaxed);
  return library_->worker_arm(worker_) != status_busy;
}

std::uint32_t UcxMessenger::extra_yields() const { return ucx_yields_before_sleep; }

// A worker that has moved something since it was armed may have more to do, such as the rest of a copy, and reports no
// event for it. So the thread must not sleep then.
std::chrono::microseconds UcxMessenger::max_sleep() const {
  if (event_descriptor_ < 0) return max_sleep_without_events;
  return moved_.load(std::memory_order_relaxed) ? std::chrono::microseconds::zero() : max_sleep_with_events;
}

}  // namespace unisono
