// A UCX with CUDA support, for tests with a device double. The double's memory is host memory, so this library passes
// it to UCX as host memory. Everything else is the real library, which it is linked with and whose headers it is
// compiled with.
#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <atomic>
#include <cstddef>

namespace {

std::atomic<size_t> sent{0}, received{0}, entries{0}, entries_without_context{0};

template <class Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// UCX calls CUDA for device memory, which needs a current context if there is a driver.
bool has_context() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return true;
  const auto get_address =
      reinterpret_cast<int (*)(const char*, void**, int, uint64_t, int*)>(dlsym(driver, "cuGetProcAddress_v2"));
  void* get_current = nullptr;
  void* context = nullptr;
  return get_address("cuCtxGetCurrent", &get_current, 12000, 0, nullptr) == 0 &&
         reinterpret_cast<int (*)(void**)>(get_current)(&context) == 0 && context != nullptr;
}

void note_entry() {
  if (sent + received == 0) return;
  ++entries;
  if (!has_context()) ++entries_without_context;
}

// Returns the parameters for the real library; counts messages whose memory is declared as CUDA's.
ucp_request_param_t on_host(const ucp_request_param_t* original, size_t nbytes, std::atomic<size_t>& counter) {
  ucp_request_param_t param = *original;
  const bool is_cuda = (param.op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) != 0 &&
                       (param.memory_type == UCS_MEMORY_TYPE_CUDA || param.memory_type == UCS_MEMORY_TYPE_CUDA_MANAGED);
  if (!is_cuda) return param;
  counter += nbytes;
  note_entry();
  param.op_attr_mask &= ~UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  return param;
}

}  // namespace

extern "C" size_t cuda_nbytes_sent() { return sent; }
extern "C" size_t cuda_nbytes_received() { return received; }
extern "C" size_t cuda_entries() { return entries; }
extern "C" size_t cuda_entries_without_context() { return entries_without_context; }

extern "C" ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
  const ucs_status_t status = real(ucp_context_query, "ucp_context_query")(context, attributes);
  if (attributes->field_mask & UCP_ATTR_FIELD_MEMORY_TYPES)
    attributes->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA) | UCS_BIT(UCS_MEMORY_TYPE_CUDA_MANAGED);
  return status;
}

extern "C" unsigned ucp_worker_progress(ucp_worker_h worker) {
  note_entry();
  return real(ucp_worker_progress, "ucp_worker_progress")(worker);
}

extern "C" ucs_status_t ucp_worker_arm(ucp_worker_h worker) {
  note_entry();
  return real(ucp_worker_arm, "ucp_worker_arm")(worker);
}

extern "C" ucs_status_ptr_t ucp_tag_send_nbx(ucp_ep_h endpoint, const void* data, size_t nbytes, ucp_tag_t tag,
                                             const ucp_request_param_t* param) {
  const ucp_request_param_t plain = on_host(param, nbytes, sent);
  return real(ucp_tag_send_nbx, "ucp_tag_send_nbx")(endpoint, data, nbytes, tag, &plain);
}

extern "C" ucs_status_ptr_t ucp_tag_recv_nbx(ucp_worker_h worker, void* data, size_t nbytes, ucp_tag_t tag,
                                             ucp_tag_t mask, const ucp_request_param_t* param) {
  const ucp_request_param_t plain = on_host(param, nbytes, received);
  return real(ucp_tag_recv_nbx, "ucp_tag_recv_nbx")(worker, data, nbytes, tag, mask, &plain);
}
