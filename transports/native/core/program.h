// A plan bound to lengths: what each of its steps does, in pieces of contiguous memory. Made once for a kind of call,
// and run any number of times on different memory.
//
// Theory of operation. The blocks that a step names are looked up, cut to the segment, laid over the extents of their
// buffer, and joined where they are adjacent. Where the operands of a step are cut at different places, its pieces are
// the common refinement. What results says everything in offsets from *bases*: the extents of INPUT, those of OUTPUT,
// and SCRATCH, and of the peers' buffers that a plan reads, whose addresses only the run knows. Groups of small plans
// are resolved beforehand, those of large ones each time that they are posted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "channel.h"
#include "kernels.h"
#include "layout.h"

namespace unisono {

// A run of elements of one type, reduced by one operation. A buffer is a list of them, so that several arrays can be
// one operand.
struct Extent {
  std::int64_t count;
  DType dtype;
  Combine combine;
  std::uint64_t divisor = 1;  // of results: of sums, or 0 if the kernel must see single states, too

  std::size_t itemsize() const { return dtype_table[static_cast<std::size_t>(dtype)].itemsize; }
  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize(); }
  bool is_like(const Extent& other) const {
    return dtype == other.dtype && combine == other.combine && divisor == other.divisor;
  }
};

// What lies in one place of a buffer: elements of an extent. The strips of a buffer, one after the other, are its
// elements; the blocks of a plan are counted out of these.
struct Strip {
  std::int64_t start;  // in the buffer
  std::int64_t count;
  std::size_t extent;
  std::int64_t offset;  // in the extent

  std::int64_t end() const { return start + count; }
};

// A place in memory.
struct Place {
  std::size_t base;
  std::size_t offset;  // in bytes
};

// Elements that are contiguous and of one type in every operand of a step.
struct Piece {
  std::int64_t count;
  std::size_t itemsize;
  Kernel kernel;
  std::uint64_t divisor;  // of results as in their extent, of states 1

  std::size_t nbytes() const { return static_cast<std::size_t>(count) * itemsize; }
};

// A step of a group. Its operands are the destination, if it has one, and then the sources.
struct Action {
  Opcode opcode;
  bool received_first;
  bool past_caches;  // what it stores is not looked at again, and is part of much
  std::int32_t peer;
  std::uint64_t nbytes;  // of each operand
  std::size_t first_piece;
  std::size_t pieces;
  std::size_t first_place;
  std::size_t operands;
};

// What a group does in one segment.
struct Work {
  std::vector<Action> actions;  // those that move anything
  std::vector<Piece> pieces;
  std::vector<Place> places;  // of each piece in turn, one for each operand
  Receipt receipt = Receipt::none;
  std::uint64_t local_nbytes = 0;  // that local steps write

  const Piece& piece(const Action& action, std::size_t index) const { return pieces[action.first_piece + index]; }
  const Place* places_of(const Action& action, std::size_t index) const {
    return &places[action.first_place + index * action.operands];
  }
};

class Program {
 public:
  Program() = default;
  // `extents` are those of INPUT and OUTPUT. Where `shared`, each is cut evenly into as many parts as there are blocks,
  // and a block is its part of all of them; otherwise blocks are cut out of the extents as they lie one after the
  // other. Throws std::invalid_argument if they are too short for the blocks, or a step combines blocks of different
  // lengths or types.
  Program(std::shared_ptr<const Plan> plan, AllBlocks blocks, std::array<std::vector<Extent>, 2> extents,
          std::int64_t segments, std::array<bool, 2> shared = {});

  const Plan& plan() const { return *plan_; }
  std::int64_t segments() const { return segments_; }
  std::size_t lanes() const { return plan_->lanes().size(); }
  // Groups of a lane, as run.
  std::int64_t groups(std::size_t lane) const { return plan_->lanes()[lane].groups_as_run; }
  std::int64_t instances() const { return instances_; }

  const std::vector<Extent>& extents(BufferKind kind) const { return extents_[static_cast<std::size_t>(kind)]; }
  // Of all its extents.
  std::size_t nbytes(BufferKind kind) const { return nbytes_[static_cast<std::size_t>(kind)]; }
  std::size_t scratch_base() const { return extents_[0].size() + extents_[1].size(); }
  // Where a buffer of a peer begins. Of a plan that maps, there are `bases` of them all.
  std::size_t peer_base(std::int64_t peer, BufferKind kind) const {
    return scratch_base() + 1 + static_cast<std::size_t>(peer) * buffer_kinds + static_cast<std::size_t>(kind);
  }
  std::size_t bases() const { return plan_->maps() ? peer_base(plan_->size(), BufferKind::input) : scratch_base() + 1; }
  std::size_t scratch_nbytes() const { return nbytes(BufferKind::scratch); }

  // The work of a group in a segment, which may be put into `room`.
  const Work& work(std::size_t lane, std::int64_t group, std::int64_t segment, Work& room) const {
    if (resolved_.empty()) {
      resolve(lane, group, segment, room);
      return room;
    }
    return resolved_[lane][static_cast<std::size_t>(group * segments_ + segment)];
  }

 private:
  // Elements of an operand that are contiguous.
  struct Run {
    Place place;
    std::int64_t count;
    const Extent* extent;
  };
  using Runs = std::vector<Run>;

  void lay_out_strips(BufferKind kind, bool shared);
  void add_strip(BufferKind kind, std::size_t extent, Range part);
  void lay_out_scratch();
  // Calls `each(strip, part)` for what the strips of a buffer have in `range`; `part` is counted in the buffer.
  template <class Each>
  void for_each_strip(BufferKind kind, Range range, Each each) const;
  void resolve(std::size_t lane, std::int64_t group, std::int64_t segment, Work& work) const;
  void resolve_step(const Step& step, std::int64_t iteration, std::int64_t segment, Work& work) const;
  bool goes_past_caches(const Step& step, std::int64_t iteration) const;
  void find_what_is_looked_at();
  void look_at(const Operand& source, std::int64_t iteration);
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
  std::array<std::vector<std::size_t>, buffer_kinds> offsets_;  // of the extents where they lie one after the other
  std::vector<bool> looked_at_;  // blocks of OUTPUT that a step has as a source; empty if they may be in caches
  std::vector<std::vector<Work>> resolved_;  // by lane, and group and segment; empty if there are too many
};

}  // namespace unisono
