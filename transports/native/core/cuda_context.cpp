#include "cuda_context.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>

namespace unisono {
namespace {

// From cuda.h. Functions are looked up by the name and version that it gives them.
constexpr int success = 0;
constexpr int attribute_device_ordinal = 9;
constexpr int version = 12000;

class Driver {
 public:
  // A process with memory on a device has loaded the driver under this name.
  Driver() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : ::dlsym(library, "cuGetProcAddress_v2");
    std::memcpy(&get_address_, &symbol, sizeof get_address_);
  }

  template <class Function>
  bool find(Function& function, const char* name) const {
    void* symbol = nullptr;
    if (get_address_ == nullptr || get_address_(name, &symbol, version, 0, nullptr) != success) return false;
    std::memcpy(&function, &symbol, sizeof function);
    return symbol != nullptr;
  }

 private:
  int (*get_address_)(const char*, void**, int, std::uint64_t, int*) = nullptr;
};

int device_of(const Driver& driver, const void* pointer) {
  int (*get_attributes)(unsigned, int*, void**, std::uintptr_t) = nullptr;
  int attribute = attribute_device_ordinal;
  int device = -1;
  void* value = &device;
  if (!driver.find(get_attributes, "cuPointerGetAttributes") ||
      get_attributes(1, &attribute, &value, reinterpret_cast<std::uintptr_t>(pointer)) != success)
    return -1;
  return device;
}

}  // namespace

const CudaContext& CudaContext::adopt(const void* pointer) {
  if (context_ != nullptr || pointer == nullptr) return *this;
  const Driver driver;
  int (*retain)(void**, int) = nullptr;
  if (!driver.find(push_, "cuCtxPushCurrent") || !driver.find(pop_, "cuCtxPopCurrent") ||
      !driver.find(retain, "cuDevicePrimaryCtxRetain"))
    return *this;
  const int device = device_of(driver, pointer);
  if (device >= 0 && retain(&context_, device) != success) context_ = nullptr;
  return *this;
}

CudaContext::Current::Current(const CudaContext& context) {
  if (context.context_ != nullptr && context.push_(context.context_) == success) pop_ = context.pop_;
}

CudaContext::Current::~Current() {
  void* popped = nullptr;
  if (pop_ != nullptr) pop_(&popped);
}

}  // namespace unisono
