// Sends, receives and probes with tags. Messages of one tag between two ranks arrive in the order in which they were
// sent; a receive takes the first message of its tag, and messages of other tags that stand before it are put aside in
// memory. What may come from any rank is posted in the mailboxes of all of them, in its place among what is posted
// there, until one of them has a message for it.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective.h"
#include "operation.h"

namespace unisono {

class Mailbox;

// A payload to be sent or the room to receive one; the header holds type, tag and length. One to be sent lies in memory
// that its channel takes; what is received to other memory is left on the host.
struct Parcel {
  Header header;
  std::byte* data;
  MemoryType memory = MemoryType::host;
};

// A probe looks for a message without taking it: until there is one, or once.
enum class Verb : std::uint8_t { send, receive, probe, probe_once };

// What is done with which messages; `any_tag` stands for all tags before the reserved ones, whatever the parcel's.
struct Posting {
  Verb verb;
  Parcel parcel;
  bool any_tag = false;
};
inline constexpr std::uint32_t first_reserved_tag = 1U << 31;

// The message that a receive has got, or a probe has seen.
struct Found {
  std::int32_t source;
  Header header;
};

class PointToPoint final : public Operation {
 public:
  // `mailboxes`: of the peer, or of all that a message may come from.
  PointToPoint(std::vector<std::shared_ptr<Mailbox>> mailboxes, const Posting& posting);
  ~PointToPoint() override;

  bool advance() override;
  bool done() const override { return done_; }
  void blocked_on(std::vector<Blocked>& found) const override;

  bool looks_once() const { return verb_ == Verb::probe_once; }
  // Ends a probe that has seen nothing.
  void give_up() { done_ = true; }
  const std::optional<Found>& found() const { return found_; }
  // The messages that have come from its peers with other tags, for the error of a receive that has timed out:
  // " (2 with other tags have come: 6, 8)"; empty if there are none.
  std::string unclaimed_text() const;
  // What has been received, if it is not where it belongs, but had to be put aside on the host.
  std::unique_ptr<std::byte[]> take_aside() { return std::move(aside_); }

 private:
  friend class Mailbox;

  bool probes() const { return verb_ == Verb::probe || verb_ == Verb::probe_once; }
  bool matches(const Header& header) const;
  void settle(Mailbox& mailbox, const Header& header);

  std::vector<std::shared_ptr<Mailbox>> mailboxes_;
  const Verb verb_;
  const Parcel parcel_;
  const bool any_tag_;
  std::optional<Found> found_;
  std::unique_ptr<std::byte[]> aside_;
  bool begun_ = false;
  bool done_ = false;
  std::size_t moved_ = 0;
};

// The point-to-point traffic to one peer, or from one.
class Mailbox {
 public:
  explicit Mailbox(ChannelEntry& entry) : entry_(entry) {}

  // Moves what can be moved of everything that has been posted; see `Operation::advance`.
  bool advance();
  void blocked_on(std::vector<Blocked>& found);
  // Forgets the channel, which is about to go; what is posted will not move any more.
  void close() { channel_ = nullptr; }

 private:
  friend class PointToPoint;
  struct Unexpected {
    explicit Unexpected(const Header& of)
        : header(of), data(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(of.nbytes))) {}
    Header header;
    std::unique_ptr<std::byte[]> data;
    std::size_t moved = 0;
  };

  Blocked blocked(bool sends);
  void post(PointToPoint& operation);
  void withdraw(PointToPoint& operation);
  bool open();
  bool advance_sends();
  bool advance_receives();
  bool open_front();
  bool read_all(std::byte* data, std::size_t nbytes, MemoryType memory, std::size_t& moved);
  bool move_to(PointToPoint& receive);
  bool move_aside();
  void answer_probes(const Header& header);
  PointToPoint* expecting(const Header& header);
  static void check(const PointToPoint& receive, const Header& header, std::int32_t peer);
  void deliver(PointToPoint& receive, Unexpected& message);
  void end(PointToPoint& receive);

  ChannelEntry& entry_;
  Channel* channel_ = nullptr;  // once it is open
  std::deque<PointToPoint*> sends_;
  std::deque<PointToPoint*> receives_;
  std::deque<PointToPoint*> probes_;
  std::deque<Unexpected> unexpected_;
  PointToPoint* current_ = nullptr;    // the receive that the front message goes to
  std::unique_ptr<Unexpected> aside_;  // or what it is put aside in
};

}  // namespace unisono
