// Loads and stores that need no alignment and may alias anything, for the kernels of one instruction set: see
// kernels_isa.cpp.
#pragma once

#include <cstddef>

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
