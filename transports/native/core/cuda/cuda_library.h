//! `CudaLibrary` finds functions of the CUDA driver in a process that has loaded it.
#pragma once

#include <cstdint>
#include <cstring>

namespace unisono {

//! The driver that this process has loaded. Functions are found by the name and version that cuda.h gives them.
class CudaLibrary {
 public:
  CudaLibrary();

  //! Looks up a function; returns whether the driver has it.
  template <class Function>
  bool find(Function& function, const char* name) const {
    void* symbol = address_of(name);
    std::memcpy(&function, &symbol, sizeof function);
    return symbol != nullptr;
  }

 private:
  void* address_of(const char* name) const;

  int (*get_address_)(const char*, void**, int, std::uint64_t, int*) = nullptr;
};

//! The result of a call of the driver that succeeds.
inline constexpr int cuda_success = 0;

}  // namespace unisono
