// Element types: how elements lie in memory and in packs, and in which type they are combined.
//
// An element type has `State`, the type in which single elements are combined, and `lanes`, the number of elements in a
// pack. `unpack` converts a pack to the values that operations use, and `pack` converts them back.
#pragma once

#include <stdint.h>

#include "conversions.cuh"
#include "kernel_operations.h"
#include "pack.cuh"

namespace unisono::cuda {

// Elements that are combined in their own type.
template <class T>
struct Plain {
  using State = T;
  static constexpr uint64_t itemsize = sizeof(T);
  static constexpr int lanes = pack_nbytes / itemsize;
  static Lanes<T, lanes> unpack(const Pack& packed) { return __builtin_bit_cast(Lanes<T, lanes>, packed); }
  static Pack pack(const Lanes<T, lanes>& states) { return __builtin_bit_cast(Pack, states); }
  static State load(const void* from, uint64_t i) { return static_cast<const T*>(from)[i]; }
  static void store(void* to, uint64_t i, const State& state) { static_cast<T*>(to)[i] = state; }
};

// Elements of bitwise operations, which treat a pack as four words, whatever its elements.
template <class T>
struct Bitwise : Plain<T> {
  static Lanes<uint32_t, 4> unpack(const Pack& packed) { return __builtin_bit_cast(Lanes<uint32_t, 4>, packed); }
  static Pack pack(const Lanes<uint32_t, 4>& states) { return __builtin_bit_cast(Pack, states); }
};

// Floats of 8 and 16 bits, which are combined in float32.
template <class Conversion>
struct Narrow {
  using Bits = typename Conversion::Bits;
  using State = float;
  static constexpr uint64_t itemsize = sizeof(Bits);
  static constexpr int lanes = pack_nbytes / itemsize;
  static constexpr int pairs_of_word = 4 / (2 * itemsize);
  static Lanes<float, lanes> unpack(const Pack& packed) {
    Lanes<float, lanes> states;
#pragma unroll
    for (int i = 0; i < lanes / 2; ++i) {
      const uint32_t pair = packed.words[i / pairs_of_word] >> (16 * (i % pairs_of_word));
      Conversion::decode(pair, states.values[2 * i], states.values[2 * i + 1]);
    }
    return states;
  }
  static Pack pack(const Lanes<float, lanes>& states) {
    Pack packed = {};
#pragma unroll
    for (int i = 0; i < lanes / 2; ++i) {
      const uint32_t pair = Conversion::encode(states.values[2 * i], states.values[2 * i + 1]);
      packed.words[i / pairs_of_word] |= pair << (16 * (i % pairs_of_word));
    }
    return packed;
  }
  static State load(const void* from, uint64_t i) {
    float state, beside;
    Conversion::decode(static_cast<const Bits*>(from)[i], state, beside);
    return state;
  }
  static void store(void* to, uint64_t i, const State& state) {
    static_cast<Bits*>(to)[i] = static_cast<Bits>(Conversion::encode(state, 0.0f));
  }
};

using Half = Narrow<Float16Pairs>;
using BrainHalf = Narrow<BFloat16Pairs>;
using E4M3 = Narrow<Float8Pairs<Float8E4M3>>;
using E5M2 = Narrow<Float8Pairs<Float8E5M2>>;

}  // namespace unisono::cuda
