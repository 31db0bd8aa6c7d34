// `Program`: a plan bound to lengths. It says what each step does, in pieces of contiguous memory. It is made once for
// a call signature and runs any number of times, on different memory.
//
// Theory of operation
// -------------------
// For each operand of a step, the program looks up the blocks, cuts them to the segment, lays them over the extents of
// the buffer, and joins adjacent parts. If the operands of a step are cut at different places, its pieces are their
// common refinement. Example: one operand in parts of 3 and 5 elements, and another in parts of 4 and 4, give pieces of
// 3, 1 and 4.
//
// Positions are offsets from *bases*: the extents of INPUT, those of OUTPUT, SCRATCH, and the peers' buffers if the
// plan reads them. Only a run knows the addresses of the bases. The groups of a small plan are resolved when the
// program is made, and those of a large one each time they are posted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "endpoint/channel.h"
#include "kernels/kernels.h"
#include "plan/layout.h"

namespace unisono {

//! Elements of one type, reduced by one operation. A buffer is a list of extents, so that several arrays can be one
//! operand.
struct Extent {
  std::int64_t count;
  DType dtype;
  Combine combine;
  std::uint64_t divisor = 1;  // of sums; 0: the kernel must run on a single source too, not only a copy

  //! The size of one element.
  std::size_t itemsize() const { return dtype_table[static_cast<std::size_t>(dtype)].itemsize; }
  //! The size of the extent.
  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize(); }
  //! Whether one piece of memory may contain elements of this extent and of `other`, because both have the same dtype
  //! and op.
  bool is_like(const Extent& other) const {
    return dtype == other.dtype && combine == other.combine && divisor == other.divisor;
  }
};

//! A contiguous range of an extent. The elements of a buffer are those of its strips, one after the other, and the
//! blocks of a plan are counted in this order.
struct Strip {
  std::int64_t start;  // first element, counted in the buffer
  std::int64_t count;
  std::size_t extent;
  std::int64_t offset;  // first element, counted in the extent

  //! The element behind the strip, counted in the buffer.
  std::int64_t end() const { return start + count; }
};

//! A position in memory.
struct Place {
  std::size_t base;
  std::size_t offset;  // in bytes
};

//! Elements that are contiguous and of one type in every operand of a step.
struct Piece {
  std::int64_t count;
  std::size_t itemsize;
  Kernel kernel;
  std::uint64_t divisor;  // of the extent for a result, 1 for an intermediate state

  //! The size of the piece.
  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize; }
};

//! A resolved step. Its operands are the destination, if any, and then the sources.
struct Action {
  Opcode opcode;
  bool received_first;
  bool past_caches;  // stores a part of a large result that no step reads again
  std::int32_t peer;
  std::uint64_t nbytes;  // of each operand
  std::size_t first_piece;
  std::size_t pieces;
  std::size_t first_place;
  std::size_t operands;
};

//! All steps of a group in one segment.
struct Work {
  std::vector<Action> actions;  // only steps that move data
  std::vector<Piece> pieces;
  std::vector<Place> places;  // for each piece, one for each operand
  Incoming incoming = Incoming::none;
  std::uint64_t local_nbytes = 0;  // bytes that local steps write

  //! The piece `index` of an action.
  const Piece& piece(const Action& action, std::size_t index) const { return pieces[action.first_piece + index]; }
  //! The positions of a piece, one for each operand.
  const Place* places_of(const Action& action, std::size_t index) const {
    return &places[action.first_place + index * action.operands];
  }
};

//! A plan bound to the extents of its buffers. Immutable.
class Program {
 public:
  Program() = default;
  //! `extents` are those of INPUT and OUTPUT. If `shared` is true for a buffer with n blocks, each extent is cut into n
  //! nearly equal parts, and block k is part k of every extent. If it is false, the extents lie one after the other,
  //! and the blocks are cut from that sequence. Throws std::invalid_argument if the extents are too short, or if a step
  //! combines blocks of different lengths or types.
  Program(std::shared_ptr<const Plan> plan, AllBlocks blocks, std::array<std::vector<Extent>, 2> extents,
          std::int64_t segments, std::array<bool, 2> shared = {});

  //! The plan.
  const Plan& plan() const { return *plan_; }
  //! The number of segments of each block.
  std::int64_t segments() const { return segments_; }
  //! The number of lanes.
  std::size_t lanes() const { return plan_->lanes().size(); }
  //! The number of groups of a lane as run.
  std::int64_t groups(std::size_t lane) const { return plan_->lanes()[lane].groups_as_run; }
  //! The number of (group, segment) pairs of all lanes.
  std::int64_t instances() const { return instances_; }

  //! The extents of a buffer.
  const std::vector<Extent>& extents(BufferKind kind) const { return extents_[static_cast<std::size_t>(kind)]; }
  //! The size of a buffer.
  std::size_t nbytes(BufferKind kind) const { return nbytes_[static_cast<std::size_t>(kind)]; }
  //! The base of SCRATCH.
  std::size_t scratch_base() const { return extents_[0].size() + extents_[1].size(); }
  //! The base of a peer's buffer, if the plan reads peers' memory.
  std::size_t peer_base(std::int64_t peer, BufferKind kind) const {
    return scratch_base() + 1 + static_cast<std::size_t>(peer) * buffer_kinds + static_cast<std::size_t>(kind);
  }
  //! The number of bases.
  std::size_t bases() const { return plan_->maps() ? peer_base(plan_->size(), BufferKind::input) : scratch_base() + 1; }
  //! The size of SCRATCH.
  std::size_t scratch_nbytes() const { return nbytes(BufferKind::scratch); }

  //! The steps of a group in a segment. They may be resolved into `room`.
  const Work& work(std::size_t lane, std::int64_t group, std::int64_t segment, Work& room) const {
    if (resolved_.empty()) {
      resolve(lane, group, segment, room);
      return room;
    }
    return resolved_[lane][static_cast<std::size_t>(group * segments_ + segment)];
  }

 private:
  // Contiguous elements of an operand.
  struct Run {
    Place place;
    std::int64_t count;
    const Extent* extent;
  };
  using Runs = std::vector<Run>;

  void lay_out_strips(BufferKind kind, bool shared);
  void add_strip(BufferKind kind, std::size_t extent, Range part);
  void lay_out_scratch();
  // Calls `visit(strip, part)` for the part of each strip that lies in `range`; `part` is counted in the buffer.
  template <class Each>
  void for_each_strip(BufferKind kind, Range range, Each visit) const;
  void resolve(std::size_t lane, std::int64_t group, std::int64_t segment, Work& work) const;
  void resolve_step(const Step& step, std::int64_t iteration, std::int64_t segment, Work& work) const;
  bool stores_past_caches(const Step& step, std::int64_t iteration) const;
  void find_output_blocks_read();
  void mark_read(const Operand& source, std::int64_t iteration);
  void find_runs(const Operand& operand, std::int64_t iteration, std::int64_t segment, Runs& runs) const;
  void find_runs_of_peer(const Operand& operand, std::int64_t peer, std::int64_t iteration, std::int64_t segment,
                         const Operand& dst, Runs& runs) const;
  void add_runs(BufferKind kind, Range range, Runs& runs) const;
  void add_runs_of_peer(std::size_t base, BufferKind like, Range range, Runs& runs) const;
  void add_runs_of_block(std::size_t base, BufferKind like, std::int64_t origin, Range range, Runs& runs) const;
  static void refine(std::span<Runs> operands, bool lowers, Action& action, Work& work);

  std::shared_ptr<const Plan> plan_;
  AllBlocks blocks_;
  std::array<std::vector<Extent>, buffer_kinds> extents_;
  std::int64_t segments_ = 1;
  std::int64_t instances_ = 0;
  std::array<std::size_t, buffer_kinds> nbytes_{};
  std::array<std::vector<Strip>, buffer_kinds> strips_;
  std::array<std::vector<std::size_t>, buffer_kinds> offsets_;  // of each extent, if extents lie one after the other
  std::vector<bool> output_blocks_read_;     // blocks of OUTPUT that a step reads; empty if results may stay in caches
  std::vector<std::vector<Work>> resolved_;  // by lane, and by group and segment; empty if the plan is too large
};

}  // namespace unisono
