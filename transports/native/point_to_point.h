// Sends and receives with tags. Messages of one tag between two ranks arrive in the order in which they were sent; a
// receive takes the first message of its tag, and messages of other tags that stand before it are put aside in memory.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "collective.h"
#include "operation.h"

namespace unisono {

class Mailbox;

// A payload to be sent or the room to receive one; the header holds type, tag and length.
struct Parcel {
  Header header;
  std::byte* data;
};

class PointToPoint final : public Operation {
 public:
  PointToPoint(std::shared_ptr<Mailbox> mailbox, const Parcel& parcel, bool sends);
  ~PointToPoint() override;

  bool advance() override;
  bool done() const override { return done_; }
  void blocked_on(std::vector<Blocked>& found) const override;

 private:
  friend class Mailbox;
  std::shared_ptr<Mailbox> mailbox_;
  Parcel parcel_;
  bool sends_;
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
    Header header;
    std::vector<std::byte> data;
  };

  void post(PointToPoint& operation);
  void withdraw(PointToPoint& operation);
  bool open();
  bool advance_sends();
  bool advance_receives();
  bool open_front();
  bool move_to(PointToPoint& receive);
  bool move_aside();
  PointToPoint* expecting(const Header& header);
  static void check(const PointToPoint& receive, const Header& header, std::int32_t peer);
  void deliver(PointToPoint& receive, const Unexpected& message);
  void end(PointToPoint& receive);

  ChannelEntry& entry_;
  Channel* channel_ = nullptr;  // once it is open
  std::deque<PointToPoint*> sends_;
  std::deque<PointToPoint*> receives_;
  std::deque<Unexpected> unexpected_;
  PointToPoint* current_ = nullptr;    // the receive that the front message goes to
  std::unique_ptr<Unexpected> aside_;  // or what it is put aside in
};

}  // namespace unisono
