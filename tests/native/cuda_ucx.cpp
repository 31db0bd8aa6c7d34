// UCX that knows CUDA, in tests: where a device is a double, its memory is the host's, and so UCX is told when it is asked
// to move it. Everything else is the real library, which this one is linked with, and whose headers it is compiled with.
#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <atomic>
#include <cstddef>

namespace {

std::atomic<size_t> sent{0}, received{0};

template <class Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// What to give to the real library; counts what is told to be CUDA's.
ucp_request_param_t on_host(const ucp_request_param_t* given, size_t nbytes, std::atomic<size_t>& counter) {
  ucp_request_param_t param = *given;
  const bool is_cuda = (param.op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) != 0 &&
                       (param.memory_type == UCS_MEMORY_TYPE_CUDA || param.memory_type == UCS_MEMORY_TYPE_CUDA_MANAGED);
  if (!is_cuda) return param;
  counter += nbytes;
  param.op_attr_mask &= ~UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  return param;
}

}  // namespace

extern "C" size_t cuda_nbytes_sent() { return sent; }
extern "C" size_t cuda_nbytes_received() { return received; }

extern "C" ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
  const ucs_status_t status = real(ucp_context_query, "ucp_context_query")(context, attributes);
  if (attributes->field_mask & UCP_ATTR_FIELD_MEMORY_TYPES)
    attributes->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA) | UCS_BIT(UCS_MEMORY_TYPE_CUDA_MANAGED);
  return status;
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
