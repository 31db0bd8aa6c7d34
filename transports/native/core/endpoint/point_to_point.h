// Sends, receives and probes with tags.
//
// Messages with one tag between two ranks arrive in the order in which they were sent. A receive takes the first
// message with its tag. Messages with other tags in front of it are buffered in memory. A receive from any rank is
// posted in the mailboxes of all ranks, until one of them has a message for it. The mailbox of this rank itself is
// among them. But such a receive does not wait for this rank: it fails when all other ranks have gone.
//
// A synchronous message carries a number. When a receive has got it, the receiver acknowledges it by an empty message
// with this number as its tag, in the other direction of the channel, which carries nothing else. The sender posts a
// receive there, and its operation ends with it. So ordinary messages carry no more bytes, and no acknowledgement waits
// behind one of them. A message that is taken is acknowledged when its holder receives it.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "endpoint/operation.h"
#include "endpoint/self_channel.h"
#include "plan/collective.h"

namespace unisono {

class Mailbox;

//! A payload to send, or memory for one to receive. The header holds type, tag, length and shape. A payload to send
//! must lie in memory that its channel accepts. A receive into other memory leaves the bytes on the host.
struct MessageBuffer {
  Header header;
  std::byte* data;
  MemoryType memory = MemoryType::host;
};

//! Returns the array of a message as errors show it: "float64[6,4]".
std::string array_text(const Header& header);

//! The operation on a message. `probe` looks for a message without taking it until there is one, and `probe_once`
//! looks once. `take` and `take_once` look in the same way, and receive the message that they find into memory of the
//! host, whatever its type and length. `acknowledge` sends the acknowledgement of a message that was taken.
enum class Verb : std::uint8_t { send, receive, probe, probe_once, take, take_once, acknowledge };

//! A verb and its message. With `any_tag` it matches all tags below the reserved ones, whatever the header says. With
//! `listens` it may wait for a message that nobody sends, so it goes on when all other ranks have departed.
//! With `up_to` a receive takes a message of at most as many bytes as the buffer has. It then must have the type of the
//! buffer, unless one of the two is bytes.
struct Posting {
  Verb verb;
  MessageBuffer buffer;
  bool any_tag = false;
  bool listens = false;
  bool up_to = false;
};
inline constexpr std::uint32_t first_reserved_tag = 1U << 31;
//! Stands for the tags from `first_reserved_tag` up to it, which are those of Python objects.
inline constexpr std::uint32_t any_object_tag = 3U << 30;

//! The header of the acknowledgement of a synchronous message.
inline Header acknowledgement_of(std::uint32_t number) {
  return {0, 0, static_cast<std::uint32_t>(DType::uint8), number, 0, kind_point_to_point};
}

//! The message that a receive took or a probe has found.
struct MatchedMessage {
  std::int32_t source;
  Header header;
};

//! One send, receive or probe.
class PointToPoint final : public Operation {
 public:
  //! Posts the operation in the mailbox of the peer, or in the mailboxes of all peers from which a message may come.
  PointToPoint(std::vector<std::shared_ptr<Mailbox>> mailboxes, const Posting& posting);
  ~PointToPoint() override;

  bool advance() override;
  bool done() const override { return done_; }
  void blocked_on(std::vector<Blocked>& waits) const override;

  //! Whether this is a probe that ends at once, even if no message has arrived.
  bool probes_once() const { return verb_ == Verb::probe_once || (verb_ == Verb::take_once && !matched_); }
  //! Ends a probe that has found nothing, or a receive that has matched nothing.
  void give_up() { done_ = true; }
  //! The matching message, once it is known.
  const std::optional<MatchedMessage>& matched() const { return matched_; }
  //! Describes the messages with other tags that have arrived, for the error of a timed-out receive: " (2 with other
  //! tags have come: 6, 8)"; empty if there are none.
  std::string unclaimed_text() const;
  //! The received bytes, if they were buffered on the host because the channel does not accept the destination,
  //! or because the operation takes the message.
  std::unique_ptr<std::byte[]> take_host_copy() { return std::move(host_copy_); }

 private:
  friend class Mailbox;

  bool takes() const { return verb_ == Verb::take || verb_ == Verb::take_once; }
  bool probes() const { return verb_ == Verb::probe || verb_ == Verb::probe_once; }
  bool matches(const Header& header) const;
  void match_with(Mailbox& mailbox, const Header& header);
  void go_on_with_acknowledgement(std::uint32_t number);

  std::vector<std::shared_ptr<Mailbox>> mailboxes_;
  const Verb verb_;
  MessageBuffer buffer_;  // of a synchronous message that has been moved: its acknowledgement
  const bool any_tag_;
  const bool listens_;
  const bool up_to_;
  std::optional<MatchedMessage> matched_;
  std::unique_ptr<std::byte[]> host_copy_;
  bool sends_;  // whether it sends now
  bool begun_ = false;
  bool done_ = false;
  std::size_t moved_ = 0;
};

//! The point-to-point messages to one peer, or from one peer.
class Mailbox {
 public:
  //! `own`: the queue of the messages of this rank to itself, if this mailbox is for them, and otherwise null.
  Mailbox(ChannelEntry& entry, std::shared_ptr<SelfQueue> own) : entry_(entry), own_(std::move(own)) {}

  //! Moves the data of all posted operations as far as possible now; see `Operation::advance`.
  bool advance();
  //! Adds this channel if an operation waits on it.
  void blocked_on(std::vector<Blocked>& waits);
  //! Whether a receive is posted for messages with this header.
  bool expects(const Header& header) { return find_receive(header) != nullptr; }
  //! Forgets the channel, which is about to close. Posted operations make no more progress.
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
  void expect(PointToPoint& operation);
  void withdraw(PointToPoint& operation);
  bool open();
  bool advance_sends();
  void end_send(PointToPoint& send);
  bool advance_receives();
  bool open_front();
  bool read_all(std::byte* data, std::size_t nbytes, MemoryType memory, std::size_t& moved);
  bool move_to(PointToPoint& receive);
  bool move_to_buffer();
  void answer_probes(const Header& header);
  PointToPoint* find_receive(const Header& header);
  static void check(const PointToPoint& receive, const Header& header, std::int32_t peer);
  void deliver(PointToPoint& receive, Unexpected& message);
  void end(PointToPoint& receive);
  void acknowledge(PointToPoint& receive, std::uint32_t number);

  ChannelEntry& entry_;
  const std::shared_ptr<SelfQueue> own_;
  Channel* channel_ = nullptr;  // nullptr until it is open
  std::deque<PointToPoint*> sends_;
  std::deque<PointToPoint*> receives_;
  std::deque<PointToPoint*> probes_;
  std::deque<Unexpected> unexpected_;
  PointToPoint* current_ = nullptr;       // the receive that takes the front message
  std::unique_ptr<Unexpected> buffered_;  // or the buffer for the front message
};

}  // namespace unisono
