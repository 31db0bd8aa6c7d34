#include "cuda/cuda_library.h"

#include <dlfcn.h>

namespace unisono {
namespace {

// The version of CUDA whose functions are used.
constexpr int cuda_version = 12000;

}  // namespace

// A process with memory on a device has loaded the driver under this name.
CudaLibrary::CudaLibrary() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : ::dlsym(library, "cuGetProcAddress_v2");
  std::memcpy(&get_address_, &symbol, sizeof get_address_);
}

void* CudaLibrary::address_of(const char* name) const {
  void* symbol = nullptr;
  if (get_address_ == nullptr || get_address_(name, &symbol, cuda_version, 0, nullptr) != cuda_success) return nullptr;
  return symbol;
}

}  // namespace unisono
