#include "endpoint/point_to_point.h"

#include <algorithm>
#include <string>

#include "endpoint/message_shape.h"
#include "kernels/dtype.h"
#include "kernels/kernels.h"

namespace unisono {

std::string array_text(const Header& header) {
  const TypeText type = text_of(ElementType(header.sequence));
  return type.name + shape_text(header.digest, header.nbytes / type.itemsize);
}

// Whether the elements are bytes, which `up_to` receives into an array of any type.
static bool is_bytes(const Header& header) { return header.sequence == static_cast<std::uint32_t>(DType::uint8); }

PointToPoint::PointToPoint(std::vector<std::shared_ptr<Mailbox>> mailboxes, const Posting& posting)
    : mailboxes_(std::move(mailboxes)),
      verb_(posting.verb),
      buffer_(posting.buffer),
      any_tag_(posting.any_tag),
      listens_(posting.listens),
      up_to_(posting.up_to),
      sends_(verb_ == Verb::send || verb_ == Verb::acknowledge) {
  for (std::size_t i = 0; i < mailboxes_.size() && !done_; ++i) mailboxes_[i]->post(*this);
}

PointToPoint::~PointToPoint() {
  for (const auto& mailbox : mailboxes_) mailbox->withdraw(*this);
}

bool PointToPoint::advance() {
  bool moved = false;
  for (std::size_t i = 0; i < mailboxes_.size(); ++i) moved |= mailboxes_[i]->advance();
  return moved;
}

void PointToPoint::blocked_on(std::vector<Blocked>& waits) const {
  if (done_) return;
  for (const auto& mailbox : mailboxes_)
    if (!mailbox->own_ || mailboxes_.size() == 1) waits.push_back(mailbox->blocked(sends_));
}

std::string PointToPoint::unclaimed_text() const {
  constexpr std::size_t most_tags = 4;
  std::string tags;
  std::size_t count = 0;
  for (const auto& mailbox : mailboxes_)
    for (const auto& message : mailbox->unexpected_)
      if (++count <= most_tags) tags.append(tags.empty() ? "" : ", ").append(std::to_string(message.header.group));
  if (count == 0) return "";
  if (count > most_tags) tags.append(", ...");
  return std::string(" (")
      .append(std::to_string(count))
      .append(" with other tags have come: ")
      .append(tags)
      .append(")");
}

bool PointToPoint::matches(const Header& header) const {
  if (any_tag_) return header.group < first_reserved_tag;
  if (buffer_.header.group != any_object_tag) return header.group == buffer_.header.group;
  return header.group >= first_reserved_tag && header.group < any_object_tag;
}

// The operation takes this message and withdraws from all other mailboxes.
void PointToPoint::match_with(Mailbox& mailbox, const Header& header) {
  matched_ = {mailbox.entry_.peer, header};
  std::erase_if(mailboxes_, [&](const std::shared_ptr<Mailbox>& other) {
    if (other.get() == &mailbox) return false;
    other->withdraw(*this);
    return true;
  });
}

// The message has been sent or received, and now its acknowledgement travels in the other direction.
void PointToPoint::go_on_with_acknowledgement(std::uint32_t number) {
  buffer_ = {acknowledgement_of(number), nullptr};
  begun_ = false;
  moved_ = 0;
  sends_ = !sends_;
}

Blocked Mailbox::blocked(bool sends) { return {open() ? channel_ : nullptr, entry_.peer, sends, !sends}; }

void Mailbox::post(PointToPoint& operation) {
  if (!operation.sends_)
    expect(operation);
  else if (!own_)
    sends_.push_back(&operation);
  else if (operation.verb_ == Verb::send)
    own_->add(operation.buffer_.header, operation.buffer_.data, operation.done_);
  else
    acknowledge(operation, operation.buffer_.header.group);
}

void Mailbox::expect(PointToPoint& operation) {
  const auto waiting = std::find_if(unexpected_.begin(), unexpected_.end(),
                                    [&](const Unexpected& message) { return operation.matches(message.header); });
  if (waiting == unexpected_.end()) {
    (operation.probes() ? probes_ : receives_).push_back(&operation);
  } else if (operation.probes()) {
    operation.match_with(*this, waiting->header);
    operation.done_ = true;
  } else {
    deliver(operation, *waiting);
    unexpected_.erase(waiting);
  }
}

void Mailbox::withdraw(PointToPoint& operation) {
  if (own_ && operation.verb_ == Verb::send && !operation.done_) own_->forget(operation.done_);
  std::erase(sends_, &operation);
  std::erase(receives_, &operation);
  std::erase(probes_, &operation);
  if (current_ == &operation) current_ = nullptr;
}

bool Mailbox::open() {
  if (channel_ == nullptr) channel_ = entry_.channel.load(std::memory_order_acquire);
  return channel_ != nullptr;
}

bool Mailbox::advance() {
  const bool sent = advance_sends();
  return advance_receives() || sent;
}

void Mailbox::blocked_on(std::vector<Blocked>& waits) {
  if (!sends_.empty()) waits.push_back(blocked(true));
  if (receives_.empty() && probes_.empty()) return;
  const auto are_all = [this](auto holds) {
    return std::all_of(receives_.begin(), receives_.end(), holds) && std::all_of(probes_.begin(), probes_.end(), holds);
  };
  const bool needed =
      !are_all([](const PointToPoint* operation) { return operation->listens_ || operation->mailboxes_.size() > 1; });
  if (!needed && own_) return;
  waits.push_back(blocked(false));
  waits.back().needed = needed;
  waits.back().listens = are_all([](const PointToPoint* operation) { return operation->listens_; });
}

bool Mailbox::advance_sends() {
  bool moved = false;
  if (!open()) return false;
  while (!sends_.empty()) {
    PointToPoint& send = *sends_.front();
    if (!send.begun_) {
      if (!channel_->begin(send.buffer_.header, send.buffer_.data, send.buffer_.memory)) return moved;
      send.begun_ = moved = true;
    }
    const std::size_t nbytes = send.buffer_.header.nbytes;
    while (send.moved_ < nbytes) {
      const std::size_t taken = channel_->write(send.buffer_.data + send.moved_, nbytes - send.moved_);
      if (taken == 0) return moved;
      send.moved_ += taken;
      moved = true;
    }
    if (!channel_->flush()) return moved;
    moved = true;
    sends_.pop_front();
    end_send(send);
  }
  return moved;
}

// The receiver may have acknowledged the message before the channel says that it has been sent.
void Mailbox::end_send(PointToPoint& send) {
  const std::uint32_t number = send.verb_ == Verb::send ? send.buffer_.header.segment : 0;
  send.done_ = number == 0;
  if (send.done_) return;
  send.go_on_with_acknowledgement(number);
  expect(send);
}

bool Mailbox::advance_receives() {
  bool moved = false;
  if (!open()) return false;
  while ((current_ != nullptr || buffered_ || open_front()) &&
         (current_ != nullptr ? move_to(*current_) : move_to_buffer()))
    moved = true;
  return moved;
}

// Decides which receive gets the front message. If nothing is posted, the message stays in the channel, which holds up
// its sender.
bool Mailbox::open_front() {
  if (receives_.empty() && probes_.empty()) return false;
  const Header* header = channel_->front();
  if (header == nullptr) return false;
  if (header->kind != kind_point_to_point) throw ProtocolError("a message of a collective on a point-to-point channel");
  if (!ElementType(header->sequence).is_valid()) throw ProtocolError("a message of elements of no known type");
  if (PointToPoint* receive = find_receive(*header)) {
    receive->match_with(*this, *header);
    check(*receive, *header, entry_.peer);
    if (!receive->takes() && channel_->accepts(receive->buffer_.memory, header->nbytes)) {
      current_ = receive;
    } else {
      buffered_ = std::make_unique<Unexpected>(*header);
    }
    return true;
  }
  answer_probes(*header);
  if (receives_.empty() && probes_.empty()) return false;
  buffered_ = std::make_unique<Unexpected>(*header);
  return true;
}

// Ends all probes that match a message which no receive takes.
void Mailbox::answer_probes(const Header& header) {
  std::erase_if(probes_, [&](PointToPoint* probe) {
    if (!probe->matches(header)) return false;
    probe->match_with(*this, header);
    return probe->done_ = true;
  });
}

PointToPoint* Mailbox::find_receive(const Header& header) {
  const auto match = std::find_if(receives_.begin(), receives_.end(),
                                  [&](const PointToPoint* receive) { return receive->matches(header); });
  return match == receives_.end() ? nullptr : *match;
}

void Mailbox::check(const PointToPoint& receive, const Header& header, std::int32_t peer) {
  if (receive.takes()) return;
  const Header& expected = receive.buffer_.header;
  const bool is_same_type = header.sequence == expected.sequence;
  if (is_same_type && header.nbytes == expected.nbytes && shapes_fit(header.digest, expected.digest)) return;
  const bool fits = header.nbytes <= expected.nbytes && (is_same_type || is_bytes(header) || is_bytes(expected));
  if (receive.up_to_ && fits) return;
  throw Mismatch(peer, -1,
                 array_text(header) + " with tag " + std::to_string(header.group) + ", where " +
                     (receive.up_to_ ? "at most " : "") + array_text(expected) + " is to be received");
}

// Reads more of the front message into `data`, into which `moved` of its bytes have been read already. Returns true if
// the message is complete.
bool Mailbox::read_all(std::byte* data, std::size_t nbytes, MemoryType memory, std::size_t& moved) {
  if (nbytes == 0) channel_->consume(0);
  while (moved < nbytes) {
    const bool past_caches = nbytes >= Channel::more_than_caches_nbytes && memory == MemoryType::host;
    const std::size_t got = past_caches ? channel_->read_past_caches(data + moved, nbytes - moved)
                                        : channel_->read(data + moved, nbytes - moved, memory);
    if (got == 0) return false;
    moved += got;
  }
  return true;
}

bool Mailbox::move_to(PointToPoint& receive) {
  const std::size_t before = receive.moved_;
  const MessageBuffer& buffer = receive.buffer_;
  if (!read_all(buffer.data, receive.matched_->header.nbytes, buffer.memory, receive.moved_))
    return receive.moved_ != before;
  end(receive);
  current_ = nullptr;
  return true;
}

bool Mailbox::move_to_buffer() {
  if (!read_all(buffered_->data.get(), buffered_->header.nbytes, MemoryType::host, buffered_->moved)) return false;
  if (PointToPoint* receive = find_receive(buffered_->header)) {
    deliver(*receive, *buffered_);
  } else {
    answer_probes(buffered_->header);
    unexpected_.push_back(std::move(*buffered_));
  }
  buffered_.reset();
  return true;
}

void Mailbox::deliver(PointToPoint& receive, Unexpected& message) {
  receive.match_with(*this, message.header);  // first, so that no mailbox holds a receive whose check throws
  check(receive, message.header, entry_.peer);
  if (receive.takes() || receive.buffer_.memory != MemoryType::host) {
    receive.host_copy_ = std::move(message.data);
  } else if (message.moved != 0) {
    copy_array(receive.buffer_.data, message.data.get(), message.moved);
  }
  end(receive);
}

void Mailbox::end(PointToPoint& receive) {
  std::erase(receives_, &receive);
  const std::uint32_t number = receive.matched_->header.segment;
  receive.done_ = number == 0 || receive.takes();
  if (!receive.done_) acknowledge(receive, number);
}

// Lets the sender of a synchronous message know that a receive has got it.
void Mailbox::acknowledge(PointToPoint& receive, std::uint32_t number) {
  if (own_) {
    own_->acknowledge(number);
    receive.done_ = true;
  } else {
    receive.go_on_with_acknowledgement(number);
    sends_.push_back(&receive);
  }
}

}  // namespace unisono
