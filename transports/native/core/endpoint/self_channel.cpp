#include "endpoint/self_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace unisono {

void SelfQueue::add(const Header& header, const std::byte* data, bool& sent) {
  const auto nbytes = static_cast<std::size_t>(header.nbytes);
  if (header.segment != 0) unacknowledged_.push_back({header.segment, &sent});
  if (header.segment != 0 || !has_room(nbytes)) {
    messages_.push_back({header, data, nullptr, &sent});
    return;
  }
  auto buffered = std::make_unique_for_overwrite<std::byte[]>(nbytes);
  if (nbytes != 0) std::memcpy(buffered.get(), data, nbytes);
  const std::byte* copy = buffered.get();
  messages_.push_back({header, copy, std::move(buffered), nullptr});
  used_ += nbytes + nbytes_per_message;
  sent = true;
}

void SelfQueue::acknowledge(std::uint32_t number) {
  const auto has_number = [&](const Unacknowledged& message) { return message.number == number; };
  const auto message = std::find_if(unacknowledged_.begin(), unacknowledged_.end(), has_number);
  if (message == unacknowledged_.end()) return;  // its send has failed
  *message->sent = true;
  unacknowledged_.erase(message);
}

void SelfQueue::forget(const bool& sent) {
  const auto is_of_send = [&](const auto& message) { return message.sent == &sent; };
  std::erase_if(messages_, is_of_send);
  std::erase_if(unacknowledged_, is_of_send);
}

bool SelfQueue::consume(std::size_t nbytes) {
  Message& message = messages_.front();
  message.consumed += nbytes;
  if (message.consumed < message.header.nbytes) return false;
  if (message.sent != nullptr)
    *message.sent = message.header.segment == 0;
  else
    used_ -= static_cast<std::size_t>(message.header.nbytes) + nbytes_per_message;
  messages_.pop_front();
  return true;
}

namespace {

// The channel never closes. It wakes no thread, because only threads of this process send over it, and they wake the
// leader.
class SelfChannel final : public Channel {
 public:
  SelfChannel(std::int32_t me, std::shared_ptr<SelfQueue> queue) : Channel(me, "self"), queue_(std::move(queue)) {}

  bool begin(const Header& /*header*/, Whole /*whole*/, MemoryType /*memory*/) override { return false; }
  std::size_t write(const std::byte* /*data*/, std::size_t /*nbytes*/) override { return 0; }
  bool flush() override { return true; }

  const Header* front() override { return queue_->empty() ? nullptr : &queue_->front(); }
  std::span<const std::byte> readable() override { return queue_->readable(); }
  void consume(std::size_t nbytes) override {
    counters_->sent_nbytes += nbytes;
    counters_->received_nbytes += nbytes;
    if (!queue_->consume(nbytes)) return;
    counters_->sent_messages += 1;
    counters_->received_messages += 1;
  }

  bool may_progress(bool /*for_send*/, bool for_receive) const override { return for_receive && !queue_->empty(); }
  bool closed() override { return false; }
  void prepare_sleep(bool /*for_send*/, bool /*for_receive*/, std::vector<pollfd>& /*descriptors*/) override {}
  void cancel_sleep() override {}

 private:
  std::shared_ptr<SelfQueue> queue_;
};

}  // namespace

std::unique_ptr<Channel> make_self_channel(std::int32_t me, std::shared_ptr<SelfQueue> queue) {
  return std::make_unique<SelfChannel>(me, std::move(queue));
}

}  // namespace unisono
