// `WindowPart`: the memory that one rank exposes in a window, and the operations on it.
//
// Theory of operation
// -------------------
// Any rank that maps the part runs the operations itself, and the rank that owns it runs them for ranks that do not.
// MPI-4.1 (chapter 12) demands that accumulates, fetches and swaps are atomic for each element, also with each other.
// They all pass the gate of the part (`window_gate.h`). An accumulate of more than 8 elements without gaps closes it,
// and runs a vector kernel on 64 KiB at a time. Every other one only enters it, and works on 64 elements at a time: it
// reads them, combines all of them by a vector kernel, and stores each by one compare-and-swap. If a swap fails,
// because another thread has changed the element, it combines that element again. For example, a sum at 1,000 positions
// takes 16 such rounds. `put` and `get` are plain copies, as in MPI: programs order them by epochs.
//
// Positions come from peers, so each operation checks them before it touches memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "windows/window_gate.h"

namespace unisono {

//! The operations of an accumulate: those of `Combine`, and two more.
enum class WindowOp : std::uint8_t { replace = 32, no_op = 33 };

//! Elements of a part: `count` elements from `start` on, each `step` after the one before; or those at `indices`.
struct Selection {
  std::int64_t start = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
  std::span<const std::int64_t> indices{};

  //! The position of element `i` of the selection.
  std::int64_t position(std::int64_t i) const {
    return indices.empty() ? start + i * step : indices[static_cast<std::size_t>(i)];
  }
};

//! The memory that one rank exposes. It owns neither the memory nor the gate of its accumulates.
class WindowPart {
 public:
  WindowPart(std::byte* data, std::size_t nbytes, WindowGate& gate) : data_(data), nbytes_(nbytes), gate_(&gate) {}

  //! The number of whole elements of a type.
  std::int64_t elements(DType dtype) const;
  //! Whether all elements of the selection are in the part, and each lies at a multiple of its size.
  bool holds(DType dtype, const Selection& selection) const;
  //! Whether `accumulate` can carry out the operation, a `Combine` or a `WindowOp`, on elements of this type.
  static bool can_accumulate(DType dtype, std::uint8_t op);

  // The functions below throw std::out_of_range unless `holds`, and std::invalid_argument unless `can_accumulate`. The
  // arrays hold `count` elements without gaps, and need no alignment.

  //! Copies `source` to the elements.
  void put(DType dtype, const Selection& selection, const std::byte* source) const;
  //! Copies the elements to `target`.
  void get(DType dtype, const Selection& selection, std::byte* target) const;
  //! Sets each element to element ∘ operand, atomically for each element. Its values before go to `result`, unless that
  //! is nullptr; `result` may be `operand`. An element that is selected twice is changed twice. Unless the outcome is
  //! `locked`, the wait at the gate has ended before all elements have been changed. If there are at most
  //! 64, none has been.
  LockOutcome accumulate(DType dtype, std::uint8_t op, const Selection& selection, const std::byte* operand,
                         std::byte* result, const Patience& patience) const;
  //! Sets one element to `value` if it has the bits of `compared`, atomically. Its bits before go to `result`, which
  //! may be `value`. Unless the outcome is `locked`, nothing has changed.
  LockOutcome compare_and_swap(DType dtype, std::int64_t position, const std::byte* compared, const std::byte* value,
                               std::byte* result, const Patience& patience) const;

 private:
  void check(DType dtype, const Selection& selection) const;
  bool takes_gate_alone(DType dtype, const Selection& selection, const std::byte* operand,
                        const std::byte* result) const;

  std::byte* data_;
  std::size_t nbytes_;
  WindowGate* gate_;
};

}  // namespace unisono
