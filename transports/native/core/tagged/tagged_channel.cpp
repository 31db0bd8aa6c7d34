#include "tagged/tagged_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/kernels.h"

namespace unisono {
namespace {

using namespace std::chrono_literals;

// After the peer has closed its socket, it counts as gone once no message has arrived for this long.
constexpr auto quiet_time = 150ms;
// How long transfers may take to end when a channel closes, and after they have been cancelled.
constexpr auto closing_time = 1000ms;
constexpr auto cancelling_time = 200ms;

// Keeps memory that the library of messages may still use. The memory is never freed, on purpose, but stays reachable
// for leak checkers.
template <class Owners>
void leak(std::unique_ptr<Owners> kept) {
  static std::mutex lock;  // guards `all`, because channels of several endpoints may close at the same time
  static auto& all = *new std::vector<std::unique_ptr<Owners>>;
  const std::lock_guard guard(lock);
  all.push_back(std::move(kept));
}

}  // namespace

TaggedChannel::EnvelopeHead TaggedChannel::Envelope::head() const {
  EnvelopeHead head;
  std::memcpy(&head, bytes.data(), sizeof head);
  return head;
}

TaggedChannel::TaggedChannel(std::int32_t peer, std::shared_ptr<Messenger> messenger, const Route& route,
                             Descriptor socket)
    : Channel(peer, messenger->name()), messenger_(std::move(messenger)), route_(route), socket_(std::move(socket)) {
  for (std::size_t i = 0; i < envelope_rooms; ++i) expect(std::make_unique<Envelope>());
}

TaggedChannel::~TaggedChannel() {
  if (::getpid() != process_) return;  // in a forked child, where the library belongs to the parent
  // When all calls have ended, only envelopes can be under way.
  const auto until = Clock::now() + closing_time;
  const auto wait_for = [&](Transfer& transfer) {
    for (; transfer.pending() && !closed() && Clock::now() < until; std::this_thread::yield())
      messenger_->test(transfer);
  };
  for (auto& envelope : out_envelopes_) wait_for(envelope->transfer);
  Transfer flushed;
  if (!closed()) messenger_->flush(route_.peer, flushed);
  wait_for(flushed);
  if (flushed.pending()) messenger_->abandon_transfer(flushed);
  const auto cancelled = Clock::now() + cancelling_time;
  static_cast<void>(release_memory(cancelled));  // the callers of failed calls have released their memory before
  for (auto& room : rooms_)
    if (room->transfer.pending()) messenger_->cancel(room->transfer);
  finish(rooms_, cancelled);
  finish(out_envelopes_, cancelled);
}

// Waits for the pending transfers of `owners`, at most until `until`. Leaks the memory of transfers that are pending
// then, and returns false if there are any.
template <class Owners>
bool TaggedChannel::finish(Owners& owners, Clock::time_point until) {
  bool all = true;
  for (auto& owner : owners) {
    while (owner->transfer.pending()) {
      messenger_->test(owner->transfer);
      if (!owner->transfer.pending()) break;
      if (Clock::now() > until) {
        messenger_->abandon_transfer(owner->transfer);
        leak(std::move(owner));
        all = false;
        break;
      }
      std::this_thread::yield();
    }
  }
  owners.clear();
  return all;
}

bool TaggedChannel::release_memory(Clock::time_point until) {
  bool all = true;
  for (Chunks* chunks : {&out_chunks_, &in_chunks_}) {
    for (auto& chunk : *chunks)
      if (chunk->transfer.pending()) messenger_->cancel(chunk->transfer);
    all &= finish(*chunks, until);
  }
  whole_ = nullptr;
  broken_ = true;
  return all;
}

void TaggedChannel::refuse(const char* what) const {
  throw ProtocolError(std::string("a message over ") + transport() + " from rank " + std::to_string(peer()) +
                      " arrived " + what);
}

// Returns whether a transfer has succeeded. A transfer that has failed sets `broken_`.
bool TaggedChannel::ended(Transfer& transfer) {
  if (transfer.pending()) messenger_->test(transfer);
  if (transfer.state == Transfer::State::failed) broken_ = true;
  return transfer.state == Transfer::State::done;
}

std::size_t TaggedChannel::chunk_at(std::uint64_t position, const Header& header) {
  return static_cast<std::size_t>(std::min<std::uint64_t>(cut_of(header).nbytes, header.nbytes - position));
}

// --- sending --------------------------------------------------------------------------------------------------------

TaggedChannel::Envelope* TaggedChannel::free_envelope() {
  for (auto& envelope : out_envelopes_) {
    if (envelope.get() == out_envelope_) continue;
    if (envelope->transfer.state == Transfer::State::idle || ended(envelope->transfer)) return envelope.get();
  }
  if (out_envelopes_.size() == envelope_rooms) return nullptr;
  out_envelopes_.push_back(std::make_unique<Envelope>());
  return out_envelopes_.back().get();
}

void TaggedChannel::post(Envelope& envelope, std::size_t nbytes) {
  EnvelopeHead head = envelope.head();
  head.acknowledged = announced_envelopes_ = consumed_envelopes_;
  std::memcpy(envelope.bytes.data(), &head, sizeof head);
  messenger_->send(route_.peer, route_.out_tag, envelope.bytes.data(), nbytes, MemoryType::host, envelope.transfer);
  ended(envelope.transfer);
}

void TaggedChannel::note_acknowledged(std::uint32_t acknowledged) {
  const std::uint32_t newly = acknowledged - acknowledged_envelopes_;
  if (newly > sent_envelopes_ - acknowledged_envelopes_) refuse("that acknowledges what was not sent");
  acknowledged_envelopes_ = acknowledged;
}

// Sends an acknowledgement if this rank has consumed at least half as many envelopes as the credit allows, and has not
// acknowledged them yet.
void TaggedChannel::acknowledge() {
  if (consumed_envelopes_ - announced_envelopes_ < most_envelopes / 2 || broken_) return;
  Envelope* envelope = free_envelope();
  if (envelope == nullptr) return;  // the next consumed envelope tries again
  const EnvelopeHead head{{}, 0, acknowledgement_envelope};
  std::memcpy(envelope->bytes.data(), &head, sizeof head);
  post(*envelope, sizeof head);
}

bool TaggedChannel::begin(const Header& header, Whole whole, MemoryType memory) {
  if (whole.data == nullptr && !is_small(header.nbytes) && cut_of(header).nbytes > chunk_nbytes)
    throw std::invalid_argument("a large point-to-point message must lie in one piece");
  take_envelopes();
  if (broken_ || sent_envelopes_ - acknowledged_envelopes_ >= most_envelopes) return false;
  Envelope* envelope = free_envelope();
  if (envelope == nullptr) return false;
  const EnvelopeHead head{header, 0, message_envelope};
  std::memcpy(envelope->bytes.data(), &head, sizeof head);
  ++sent_envelopes_;
  counters_->sent_messages += 1;
  counters_->sent_nbytes += header.nbytes;
  out_header_ = header;
  out_taken_ = out_sent_ = 0;
  out_envelope_ = nullptr;
  whole_ = nullptr;
  if (is_small(header.nbytes) && header.nbytes != 0) {
    out_envelope_ = envelope;
    return true;
  }
  post(*envelope, sizeof head);
  if (header.nbytes != 0 && whole.data != nullptr) {
    whole_ = whole.data;
    whole_memory_ = memory;
    send_whole();
  }
  return true;
}

std::size_t TaggedChannel::write(const std::byte* data, std::size_t nbytes) {
  if (out_envelope_ != nullptr) {
    std::memcpy(out_envelope_->bytes.data() + sizeof(EnvelopeHead) + out_taken_, data, nbytes);
    out_taken_ += nbytes;
    if (out_taken_ == out_header_.nbytes)
      post(*std::exchange(out_envelope_, nullptr), sizeof(EnvelopeHead) + out_header_.nbytes);
    return nbytes;
  }
  if (whole_ != nullptr) {
    out_taken_ += nbytes;
    return nbytes;
  }
  std::size_t taken = 0;
  while (taken < nbytes && room_to_stage()) {
    Chunk& stage = *out_stage_;
    const std::size_t part = std::min(nbytes - taken, stage.nbytes - stage.used);
    copy_array(stage.stage.get() + stage.used, data + taken, part);
    stage.used += part;
    taken += part;
    if (stage.used == stage.nbytes) send_stage();
  }
  out_taken_ += taken;
  return taken;
}

void TaggedChannel::reap_sent() {
  while (!out_chunks_.empty() && ended(out_chunks_.front()->transfer)) {
    if (out_chunks_.front()->stage) spare_stages_.push_back(std::move(out_chunks_.front()->stage));
    out_chunks_.pop_front();
  }
}

bool TaggedChannel::room_to_stage() {
  if (out_stage_ != nullptr) return true;
  reap_sent();
  if (broken_ || out_chunks_.size() == most_stages) return false;
  out_stage_ = std::make_unique<Chunk>();
  out_stage_->nbytes = chunk_at(out_sent_, out_header_);
  if (spare_stages_.empty()) spare_stages_.push_back(std::make_unique_for_overwrite<std::byte[]>(chunk_nbytes));
  out_stage_->stage = std::move(spare_stages_.back());
  spare_stages_.pop_back();
  return true;
}

void TaggedChannel::send_stage() {
  Chunk& chunk = *out_chunks_.emplace_back(std::move(out_stage_));
  messenger_->send(route_.peer, route_.out_tag + 1, chunk.stage.get(), chunk.nbytes, MemoryType::host, chunk.transfer);
  out_sent_ += chunk.nbytes;
}

void TaggedChannel::send_whole() {
  reap_sent();
  while (out_sent_ < out_header_.nbytes && out_chunks_.size() < cut_of(out_header_).most && !broken_) {
    Chunk& chunk = *out_chunks_.emplace_back(std::make_unique<Chunk>());
    chunk.nbytes = chunk_at(out_sent_, out_header_);
    messenger_->send(route_.peer, route_.out_tag + 1, whole_ + out_sent_, chunk.nbytes, whole_memory_, chunk.transfer);
    out_sent_ += chunk.nbytes;
    reap_sent();
  }
}

bool TaggedChannel::flush() {
  if (is_small(out_header_.nbytes)) return true;
  if (whole_ != nullptr)
    send_whole();
  else
    reap_sent();
  return out_sent_ == out_header_.nbytes && out_chunks_.empty();
}

// --- receiving ------------------------------------------------------------------------------------------------------

void TaggedChannel::expect(std::unique_ptr<Envelope> room) {
  messenger_->receive(route_.peer, route_.in_tag, room->bytes.data(), envelope_nbytes, MemoryType::host,
                      room->transfer);
  rooms_.push_back(std::move(room));
}

// Takes the envelopes that have arrived. It handles acknowledgements at once, and puts messages into `arrived_`.
void TaggedChannel::take_envelopes() {
  while (!rooms_.empty() && ended(rooms_.front()->transfer)) {
    quiet_since_.reset();
    std::unique_ptr<Envelope> envelope = std::move(rooms_.front());
    rooms_.pop_front();
    if (take_envelope(*envelope))
      arrived_.push_back(std::move(envelope));
    else
      expect(std::move(envelope));
  }
}

// Notes the acknowledgement in an envelope, and returns whether the envelope also brings a message. Throws
// ProtocolError if the envelope is malformed.
bool TaggedChannel::take_envelope(const Envelope& envelope) {
  const std::size_t nbytes = envelope.transfer.nbytes;
  if (nbytes < sizeof(EnvelopeHead)) refuse("without a header");
  const EnvelopeHead head = envelope.head();
  if (head.type != message_envelope && head.type != acknowledgement_envelope) refuse("with a damaged header");
  note_acknowledged(head.acknowledged);
  const bool brings = head.type == message_envelope;
  if (nbytes - sizeof head != (brings && is_small(head.header.nbytes) ? head.header.nbytes : 0))
    refuse("with a wrong length");
  if (brings && arrived_.size() == most_envelopes) refuse("without credit");
  return brings;
}

const Header* TaggedChannel::front() {
  if (message_open_) return &in_header_;
  take_envelopes();
  if (arrived_.empty()) return nullptr;
  open_front();
  return &in_header_;
}

void TaggedChannel::open_front() {
  in_header_ = arrived_.front()->head().header;
  in_posted_ = in_done_ = 0;
  message_open_ = true;
  counters_->received_messages += 1;
  counters_->received_nbytes += in_header_.nbytes;
}

void TaggedChannel::end_message() {
  message_open_ = false;
  std::unique_ptr<Envelope> envelope = std::move(arrived_.front());
  arrived_.pop_front();
  expect(std::move(envelope));
  ++consumed_envelopes_;
  acknowledge();
}

std::span<const std::byte> TaggedChannel::readable() {
  if (!message_open_) return {};
  if (is_small(in_header_.nbytes)) {
    const std::byte* payload = arrived_.front()->bytes.data() + sizeof(EnvelopeHead);
    return {payload + in_done_, static_cast<std::size_t>(in_header_.nbytes - in_done_)};
  }
  while (in_posted_ < in_header_.nbytes && in_chunks_.size() < most_stages && !broken_)
    post_chunk(nullptr, MemoryType::host);
  const Chunk* chunk = front_chunk();
  // A chunk that `read` receives in place is not readable: its memory belongs to the caller.
  if (chunk == nullptr || chunk->direct != nullptr) return {};
  return {chunk->stage.get() + chunk->used, chunk->nbytes - chunk->used};
}

// Posts memory for the next chunk: at `direct`, or in a stage.
void TaggedChannel::post_chunk(std::byte* direct, MemoryType memory) {
  const std::size_t nbytes = chunk_at(in_posted_, in_header_);
  if (direct == nullptr && nbytes > chunk_nbytes) refuse("that is longer than a stage");
  Chunk& chunk = *in_chunks_.emplace_back(std::make_unique<Chunk>());
  chunk.nbytes = nbytes;
  chunk.direct = direct;
  if (direct == nullptr) {
    if (spare_stages_.empty()) spare_stages_.push_back(std::make_unique_for_overwrite<std::byte[]>(chunk_nbytes));
    chunk.stage = std::move(spare_stages_.back());
    spare_stages_.pop_back();
  }
  messenger_->receive(route_.peer, route_.in_tag + 1, direct != nullptr ? direct : chunk.stage.get(), chunk.nbytes,
                      memory, chunk.transfer);
  in_posted_ += chunk.nbytes;
}

// Returns the front chunk; null if it has not arrived.
TaggedChannel::Chunk* TaggedChannel::front_chunk() {
  if (in_chunks_.empty()) return nullptr;
  Chunk& chunk = *in_chunks_.front();
  if (!ended(chunk.transfer)) return nullptr;
  if (chunk.transfer.nbytes != chunk.nbytes) refuse("with a chunk of a wrong length");
  quiet_since_.reset();
  return &chunk;
}

void TaggedChannel::consume(std::size_t nbytes) {
  if (is_small(in_header_.nbytes)) {
    in_done_ += nbytes;
    if (in_done_ == in_header_.nbytes) end_message();
  } else {
    use(*in_chunks_.front(), nbytes);
  }
}

void TaggedChannel::use(Chunk& chunk, std::size_t nbytes) {
  chunk.used += nbytes;
  in_done_ += nbytes;
  if (chunk.used == chunk.nbytes) {
    if (chunk.stage) spare_stages_.push_back(std::move(chunk.stage));
    in_chunks_.pop_front();
  }
  if (in_done_ == in_header_.nbytes) end_message();
}

// Each call of `read` continues where the last one stopped, so receives of chunks that are posted already have the
// right destination.
std::size_t TaggedChannel::read(std::byte* data, std::size_t nbytes, MemoryType memory) {
  if (is_small(in_header_.nbytes)) return Channel::read(data, nbytes, memory);
  std::size_t moved = 0;
  while (moved < nbytes && message_open_) {
    while (in_posted_ < in_header_.nbytes && in_chunks_.size() < cut_of(in_header_).most && !broken_) {
      const std::size_t ahead = static_cast<std::size_t>(in_posted_ - in_done_) + moved;
      const bool fits = ahead + chunk_at(in_posted_, in_header_) <= nbytes;
      if (!fits && in_chunks_.size() >= most_stages) break;
      post_chunk(fits ? data + ahead : nullptr, fits ? memory : MemoryType::host);
    }
    Chunk* chunk = front_chunk();
    if (chunk == nullptr) break;
    const std::size_t part = std::min(nbytes - moved, chunk->nbytes - chunk->used);
    if (chunk->direct == nullptr) copy_array(data + moved, chunk->stage.get() + chunk->used, part);
    moved += part;
    use(*chunk, part);
  }
  return moved;
}

// --- waiting --------------------------------------------------------------------------------------------------------

bool TaggedChannel::closed() {
  if (broken_) return true;
  pollfd socket{socket_.get(), POLLRDHUP, 0};
  if (::poll(&socket, 1, 0) <= 0) return false;
  const auto now = Clock::now();
  if (!quiet_since_) quiet_since_ = now;
  return now - *quiet_since_ > quiet_time;
}

void TaggedChannel::prepare_sleep(bool, bool, std::vector<pollfd>& descriptors) {
  if (!quiet_since_) descriptors.push_back({socket_.get(), POLLRDHUP, 0});
  asleep_ = messenger_->prepare_sleep(descriptors);
}

std::chrono::microseconds TaggedChannel::max_sleep() const { return asleep_ ? messenger_->max_sleep() : 0us; }

}  // namespace unisono
