// The messages of a rank to itself.
//
// Both ends are in this process and are driven by one leader, so the messages are in a queue, which the receiving
// mailbox reads as a channel. A message that fits into the buffer is copied there at once, which ends its send. The
// receiver reads another one in the memory of its sender, and its send ends when it has been read. A synchronous
// message is not buffered, and its send ends when it has been acknowledged (point_to_point.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "endpoint/channel.h"

namespace unisono {

//! The messages that this rank has sent to itself and has not received yet. Only the leader uses it.
class SelfQueue {
 public:
  //! The bytes of the buffer. Each message takes up `nbytes_per_message` of them besides its payload.
  static constexpr std::size_t buffer_nbytes = 1 << 20;
  static constexpr std::size_t nbytes_per_message = 64;

  //! Whether the buffer has room for a message of `nbytes`.
  bool has_room(std::uint64_t nbytes) const {
    return nbytes < buffer_nbytes && used_ + nbytes + nbytes_per_message <= buffer_nbytes;
  }
  //! Adds a message. `sent` becomes true when it is in the buffer or has been read, or when it has been acknowledged if
  //! it is synchronous; until then its payload must stay at `data`.
  void add(const Header& header, const std::byte* data, bool& sent);
  //! Ends the send of the synchronous message with this number.
  void acknowledge(std::uint32_t number);
  //! Lets nobody read a message that is not sent, because its send has failed.
  void forget(const bool& sent);

  bool empty() const { return messages_.empty(); }
  const Header& front() const { return messages_.front().header; }
  //! The bytes of the front message that have not been consumed.
  std::span<const std::byte> readable() const {
    const Message& message = messages_.front();
    return {message.data + message.consumed, static_cast<std::size_t>(message.header.nbytes) - message.consumed};
  }
  //! Removes bytes of the front message, and after the last one the message. Returns whether the message is removed.
  bool consume(std::size_t nbytes);

 private:
  struct Message {
    Header header;
    const std::byte* data;
    std::unique_ptr<std::byte[]> buffered;  // null if the payload is in the memory of the sender
    bool* sent;                             // null if the payload is buffered
    std::size_t consumed = 0;
  };
  struct Unacknowledged {
    std::uint32_t number;
    bool* sent;
  };

  std::deque<Message> messages_;
  std::deque<Unacknowledged> unacknowledged_;  // synchronous messages
  std::size_t used_ = 0;
};

//! Returns the channel by which rank `me` of a communicator receives the messages in its queue. Nothing is sent on it.
std::unique_ptr<Channel> make_self_channel(std::int32_t me, std::shared_ptr<SelfQueue> queue);

}  // namespace unisono
