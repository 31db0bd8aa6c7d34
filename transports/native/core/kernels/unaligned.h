// Loads and stores that need no alignment and may alias any type, for the kernels of one instruction set
// (kernels_isa.cpp).
#pragma once

#include <cstddef>

// Promises the compiler that no iteration of a loop reads memory that an earlier one has written. clang checks the
// addresses at run time instead, and would warn if a sanitizer keeps it from vectorising.
#if defined(__clang__) || defined(__CUDACC__)
#define UNISONO_INDEPENDENT
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace unisono::detail::UNISONO_ISA {
namespace {

using std::byte;

template <class T>
struct Storage {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
};
template <class T>
using Unaligned = typename Storage<T>::Unaligned;

}  // namespace
}  // namespace unisono::detail::UNISONO_ISA
