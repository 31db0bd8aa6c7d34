#include "cuda/cuda_context.h"

#include <cstdint>

#include "cuda/cuda_library.h"

namespace unisono {
namespace {

// From cuda.h.
constexpr int attribute_device_ordinal = 9;

int device_of(const CudaLibrary& driver, const void* pointer) {
  int (*get_attributes)(unsigned, int*, void**, std::uintptr_t) = nullptr;
  int attribute = attribute_device_ordinal;
  int device = -1;
  void* value = &device;
  if (!driver.find(get_attributes, "cuPointerGetAttributes") ||
      get_attributes(1, &attribute, &value, reinterpret_cast<std::uintptr_t>(pointer)) != cuda_success)
    return -1;
  return device;
}

}  // namespace

const CudaContext& CudaContext::adopt(const void* pointer) {
  if (context_ != nullptr || pointer == nullptr) return *this;
  const CudaLibrary driver;
  int (*retain)(void**, int) = nullptr;
  if (!driver.find(push_, "cuCtxPushCurrent") || !driver.find(pop_, "cuCtxPopCurrent") ||
      !driver.find(retain, "cuDevicePrimaryCtxRetain"))
    return *this;
  const int device = device_of(driver, pointer);
  if (device >= 0 && retain(&context_, device) != cuda_success) context_ = nullptr;
  return *this;
}

CudaContext::Current::Current(const CudaContext& context) {
  if (context.context_ != nullptr && context.push_(context.context_) == cuda_success) pop_ = context.pop_;
}

CudaContext::Current::~Current() {
  void* popped = nullptr;
  if (pop_ != nullptr) pop_(&popped);
}

}  // namespace unisono
