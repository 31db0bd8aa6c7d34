#include "exchange.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "check.h"
#include "system/doorbell.h"

namespace unisono::testing {
namespace {

constexpr std::size_t most_eager_nbytes = 8 << 10;

// State that both sides share.
struct Exchange {
  struct Sent {
    Transfer* transfer;  // nullptr if the sender's transfer has ended already
    const std::byte* data;
    std::size_t nbytes;
    std::vector<std::byte> copy;
  };
  struct Expected {
    Transfer* transfer;
    std::byte* data;
    std::size_t capacity;
  };
  struct Tag {
    std::deque<Sent> sent;
    std::deque<Expected> expected;
  };
  struct Side {
    std::map<std::uint64_t, Tag> tags;      // the messages to this side
    std::vector<Transfer*> sent_and_moved;  // transfers of this side's sends that the next `test` reports as done
    Doorbell bell;
  };

  explicit Exchange(std::uint64_t seed) : dice(seed) {}
  std::mutex mutex;
  Dice dice;
  std::array<Side, 2> sides;
};

class ExchangeMessenger final : public Messenger {
 public:
  ExchangeMessenger(std::shared_ptr<Exchange> exchange, std::size_t side)
      : exchange_(std::move(exchange)), us_(exchange_->sides[side]), them_(exchange_->sides[1 - side]) {}

  const char* name() const override { return "tagged"; }
  std::vector<std::byte> address() override { return {}; }
  Peer connect(std::span<const std::byte>) override { return 0; }

  void send(Peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType,
            Transfer& transfer) override {
    const std::lock_guard lock(exchange_->mutex);
    transfer = {};
    const bool eager = nbytes <= most_eager_nbytes;
    transfer.state = eager ? Transfer::State::done : Transfer::State::pending;
    auto& sent = them_.tags[tag].sent;
    sent.push_back({eager ? nullptr : &transfer, data, nbytes, {}});
    if (eager) sent.back().copy.assign(data, data + nbytes);
    them_.bell.ring();
  }

  void receive(Peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType, Transfer& transfer) override {
    const std::lock_guard lock(exchange_->mutex);
    transfer = {};
    transfer.receives = true;
    transfer.state = Transfer::State::pending;
    us_.tags[tag].expected.push_back({&transfer, data, nbytes});
  }

  void test(Transfer&) override {
    const std::lock_guard lock(exchange_->mutex);
    for (Transfer* transfer : us_.sent_and_moved) transfer->state = Transfer::State::done;
    us_.sent_and_moved.clear();
    std::vector<Tag*> movable;
    for (auto& [number, tag] : us_.tags)
      if (!tag.sent.empty() && !tag.expected.empty()) movable.push_back(&tag);
    if (!movable.empty()) move(*movable[exchange_->dice.below(movable.size())]);
  }

  void cancel(Transfer& transfer) override {
    const std::lock_guard lock(exchange_->mutex);
    if (withdraw(transfer)) transfer.state = Transfer::State::failed;
  }

  void flush(Peer, Transfer& transfer) override { transfer.state = Transfer::State::done; }

  void abandon_transfer(Transfer& transfer) override {
    const std::lock_guard lock(exchange_->mutex);
    withdraw(transfer);
    std::erase(us_.sent_and_moved, &transfer);
    transfer.state = Transfer::State::failed;
  }

  bool prepare_sleep(std::vector<pollfd>& descriptors) override {
    pollfd bell{us_.bell.get(), POLLIN, 0};
    descriptors.push_back(bell);
    if (::poll(&bell, 1, 0) == 0) return true;
    us_.bell.drain();
    return false;
  }
  std::chrono::microseconds max_sleep() const override { return std::chrono::milliseconds(20); }

 private:
  using Tag = Exchange::Tag;

  void move(Tag& tag) {
    const Exchange::Sent sent = std::move(tag.sent.front());
    const Exchange::Expected expected = tag.expected.front();
    tag.sent.pop_front();
    tag.expected.pop_front();
    const bool fits = sent.nbytes <= expected.capacity;
    if (fits && sent.nbytes != 0)
      std::memcpy(expected.data, sent.transfer == nullptr ? sent.copy.data() : sent.data, sent.nbytes);
    expected.transfer->nbytes = sent.nbytes;
    expected.transfer->state = fits ? Transfer::State::done : Transfer::State::failed;
    if (sent.transfer != nullptr) them_.sent_and_moved.push_back(sent.transfer);
    them_.bell.ring();
    us_.bell.ring();  // there may be more to move
  }

  bool withdraw(Transfer& transfer) {
    std::size_t erased = 0;
    for (auto& [number, tag] : us_.tags)
      erased += std::erase_if(tag.expected, [&](const Exchange::Expected& each) { return each.transfer == &transfer; });
    for (auto& [number, tag] : them_.tags)
      erased += std::erase_if(tag.sent, [&](const Exchange::Sent& each) { return each.transfer == &transfer; });
    return erased != 0;
  }

  const std::shared_ptr<Exchange> exchange_;
  Exchange::Side& us_;
  Exchange::Side& them_;
};

}  // namespace

MessengerPair messenger_pair(std::uint64_t seed) {
  const auto exchange = std::make_shared<Exchange>(seed);
  return {std::make_shared<ExchangeMessenger>(exchange, 0), std::make_shared<ExchangeMessenger>(exchange, 1)};
}

}  // namespace unisono::testing
