// The GPU's instructions for 8-bit floats, as documented: a value that is too large becomes the greatest number.
#pragma once

#define UNISONO_FLOAT8_INSTRUCTIONS 1
#include "conversions.cuh"

namespace unisono::cuda {

template <class Format>
struct Float8Instructions {
  static uint32_t halves(uint32_t pair) {
    float low, high;
    Pairs<Format, uint8_t>::decode(pair, low, high);
    return Float16Pairs::encode(low, high);
  }
  static uint32_t saturated(float low, float high) {
    return Pairs<Format, uint8_t>::encode(limited(low), limited(high));
  }

 private:
  static float limited(float value) {
    const float most = Format::top == 0x7f ? 448.0f : 57344.0f;
    return value > most ? most : value < -most ? -most : value;
  }
};

}  // namespace unisono::cuda
