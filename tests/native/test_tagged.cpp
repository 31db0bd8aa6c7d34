#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "drain.h"
#include "exchange.h"
#include "ranks.h"
#include "tagged/tagged_channel.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint64_t to_a = 2;
constexpr std::uint64_t to_b = 4;
constexpr std::size_t head_nbytes = sizeof(Header) + 2 * sizeof(std::uint32_t);
constexpr std::uint32_t message_envelope = 0x554e4931;

Header header_of(std::size_t nbytes, std::uint32_t kind = kind_collective) { return {11, nbytes, 22, 0, 33, kind}; }

// One end of a channel. The test plays the other end.
struct End {
  MessengerPair messengers = messenger_pair();
  SocketPair sockets = unix_pair();
  std::vector<std::unique_ptr<Transfer>> transfers;
  std::unique_ptr<TaggedChannel> channel =
      std::make_unique<TaggedChannel>(1, messengers.a, TaggedChannel::Route{0, to_b, to_a}, std::move(sockets.a));

  void send(std::uint64_t tag, const Bytes& bytes) {
    transfers.push_back(std::make_unique<Transfer>());
    messengers.b->send(0, tag, bytes.data(), bytes.size(), MemoryType::host, *transfers.back());
  }
  void send_envelope(const Header& header, std::size_t payload_nbytes, std::uint32_t acknowledged = 0,
                     std::uint32_t type = message_envelope) {
    Bytes bytes(head_nbytes + payload_nbytes);
    std::memcpy(bytes.data(), &header, sizeof header);
    std::memcpy(bytes.data() + sizeof header, &acknowledged, sizeof acknowledged);
    std::memcpy(bytes.data() + sizeof header + sizeof acknowledged, &type, sizeof type);
    send(to_a, bytes);
  }
  bool refuses() {
    return throws<ProtocolError>([&] {
      for (int i = 0; i < 50; ++i) channel->front();
    });
  }
};

void invalid_envelopes_are_refused() {
  const auto refused = [](auto&& send) {
    End end;
    send(end);
    return end.refuses();
  };
  CHECK(!refused([](End& end) { end.send_envelope(header_of(5), 5); }));
  CHECK(refused([](End& end) { end.send(to_a, Bytes(head_nbytes - 1)); }));
  CHECK(refused([](End& end) { end.send_envelope(header_of(5), 5, 0, 7); }));
  CHECK(refused([](End& end) { end.send_envelope(header_of(5), 4); }));
  CHECK(refused([](End& end) { end.send_envelope(header_of(5), 6); }));
  CHECK(refused([](End& end) { end.send_envelope(header_of(1 << 20), 1); }));
  CHECK(refused([](End& end) { end.send_envelope(header_of(5), 5, 1); }));
}

void envelopes_without_credit_are_refused() {
  End end;
  for (std::size_t i = 0; i < 2 * TaggedChannel::most_envelopes; ++i) end.send_envelope(header_of(1), 1);
  CHECK(end.refuses());
}

void chunks_of_a_wrong_length_are_refused() {
  for (const std::size_t wrong : {TaggedChannel::chunk_nbytes - 1, std::size_t{0}}) {
    End end;
    end.send_envelope(header_of(TaggedChannel::chunk_nbytes), 0);
    const Bytes chunk(wrong);
    end.send(to_a + 1, chunk);
    CHECK(eventually([&] { return end.channel->front() != nullptr; }));
    Bytes room(TaggedChannel::chunk_nbytes);
    CHECK(throws<ProtocolError>([&] {
      for (int i = 0; i < 50; ++i) end.channel->read(room.data(), room.size());
    }));
  }
}

void a_chunk_that_is_too_long_closes_the_channel() {
  End end;
  end.send_envelope(header_of(TaggedChannel::chunk_nbytes), 0);
  const Bytes chunk(TaggedChannel::chunk_nbytes + 1);
  end.send(to_a + 1, chunk);
  CHECK(eventually([&] { return end.channel->front() != nullptr; }));
  Bytes room(TaggedChannel::chunk_nbytes);
  CHECK(eventually([&] { return end.channel->read(room.data(), room.size()) == 0 && end.channel->closed(); }));
}

void random_envelopes_do_no_harm() {
  Dice dice(12);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    End end;
    for (std::size_t i = dice.below(6); i > 0; --i) {
      const std::size_t nbytes = dice.below(2) == 0 ? dice.below(100) : static_cast<std::size_t>(dice.awkward());
      const std::size_t payload = dice.below(3) != 0 && nbytes < 4000 ? nbytes : dice.below(4000);
      const auto acknowledged = static_cast<std::uint32_t>(dice.below(3) == 0 ? dice.awkward() : 0);
      const std::uint32_t kind = dice.below(2) == 0 ? kind_collective : kind_point_to_point;
      end.send_envelope(header_of(nbytes, kind), payload, acknowledged);
      if (dice.below(3) == 0) end.send(to_a + 1, Bytes(dice.below(8000)));
    }
    Drain drain(*end.channel);
    for (int i = 0; i < 20; ++i) refused += !drain.run();
  }
  CHECK(refused > 20);
}

// Only envelopes carry acknowledgements. So a sender whose peer never answers sends no more than its credit.
void a_sender_stops_when_its_credit_is_used_up() {
  MessengerPair messengers = messenger_pair();
  SocketPair sockets = unix_pair();
  TaggedChannel a(1, messengers.a, {0, to_b, to_a}, std::move(sockets.a));
  TaggedChannel b(0, messengers.b, {0, to_a, to_b}, std::move(sockets.b));
  const std::byte payload{7};
  const auto send = [&] { return a.begin(header_of(1)) && a.write(&payload, 1) == 1; };
  std::size_t sent = 0;
  while (sent < 100 && send()) ++sent;
  CHECK(sent == TaggedChannel::most_envelopes);
  std::size_t received = 0;
  CHECK(eventually([&] {
    for (int i = 0; i < 100 && received < 1000; ++i) {
      if (sent < 1000 && send()) ++sent;
      CHECK(sent - received <= TaggedChannel::most_envelopes);
      if (b.front() == nullptr) continue;
      CHECK(b.readable()[0] == payload);
      b.consume(1);
      ++received;
    }
    return received == 1000;
  }));
  CHECK(sent == 1000 && b.front() == nullptr);
}

// The library moves a payload of any size from the sender's memory to its destination by one message.
void a_point_to_point_message_is_one_message_of_the_library() {
  constexpr std::size_t nbytes = 3 << 20;
  const Header header = header_of(nbytes, kind_point_to_point);
  const Bytes payload(nbytes, std::byte{7});
  End out;
  Bytes room(nbytes);
  Transfer whole;
  out.messengers.b->receive(0, to_b + 1, room.data(), nbytes, MemoryType::host, whole);
  CHECK(out.channel->begin(header, payload.data()));
  CHECK(out.channel->write(payload.data(), nbytes) == nbytes);
  CHECK(eventually([&] {
    out.messengers.b->test(whole);
    return out.channel->flush() && !whole.pending();
  }));
  CHECK(whole.nbytes == nbytes && room == payload);

  End in;
  Bytes target(nbytes);
  in.send_envelope(header, 0);
  in.send(to_a + 1, payload);
  CHECK(eventually([&] { return in.channel->front() != nullptr; }));
  CHECK(eventually([&] { return in.channel->read(target.data(), nbytes) == nbytes; }));
  CHECK(target == payload);
}

void a_point_to_point_message_lies_in_one_piece() {
  const Header header = header_of(1 << 20, kind_point_to_point);
  End end;
  CHECK(throws<std::invalid_argument>([&] { end.channel->begin(header); }));
  end.send_envelope(header, 0);
  CHECK(eventually([&] { return end.channel->front() != nullptr; }));
  CHECK(throws<ProtocolError>([&] { end.channel->readable(); }));
}

// A program may free the memory of a failed call. Afterwards no transfer may access it: the address sanitizer reports
// an access.
void release_memory_ends_transfers_in_flight() {
  for (const std::uint32_t kind : {kind_collective, kind_point_to_point})
    for (const bool sends : {true, false}) {
      End end;
      auto memory = std::make_unique<Bytes>(5 * TaggedChannel::chunk_nbytes);
      const Header header = header_of(memory->size(), kind);
      if (sends) {
        CHECK(end.channel->begin(header, memory->data()));
        CHECK(end.channel->write(memory->data(), memory->size()) == memory->size() && !end.channel->flush());
      } else {
        end.send_envelope(header, 0);
        CHECK(eventually([&] { return end.channel->front() != nullptr; }));
        CHECK(end.channel->read(memory->data(), memory->size()) == 0);
      }
      CHECK(end.channel->release_memory(std::chrono::steady_clock::now() + std::chrono::milliseconds(100)));
      memory.reset();
      end.send(to_a + 1, Bytes(TaggedChannel::chunk_nbytes));
      Transfer any;
      for (int i = 0; i < 10; ++i) end.messengers.a->test(any);
      CHECK(end.channel->closed());
    }
}

// A library that cannot cancel a transfer.
class WithoutCancel final : public Messenger {
 public:
  explicit WithoutCancel(std::shared_ptr<Messenger> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  std::vector<std::byte> address() override { return inner_->address(); }
  Peer connect(std::span<const std::byte> address) override { return inner_->connect(address); }
  void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
            Transfer& transfer) override {
    inner_->send(peer, tag, data, nbytes, memory, transfer);
  }
  void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
               Transfer& transfer) override {
    inner_->receive(peer, tag, data, nbytes, memory, transfer);
  }
  void test(Transfer& transfer) override { inner_->test(transfer); }
  void cancel(Transfer&) override {}
  void flush(Peer peer, Transfer& transfer) override { inner_->flush(peer, transfer); }
  void abandon_transfer(Transfer& transfer) override { inner_->abandon_transfer(transfer); }
  bool prepare_sleep(std::vector<pollfd>& descriptors) override { return inner_->prepare_sleep(descriptors); }
  std::chrono::microseconds max_sleep() const override { return inner_->max_sleep(); }

 private:
  std::shared_ptr<Messenger> inner_;
};

void release_memory_reports_memory_that_the_library_keeps() {
  MessengerPair messengers = messenger_pair();
  SocketPair sockets = unix_pair();
  const Bytes memory(TaggedChannel::chunk_nbytes);
  TaggedChannel channel(1, std::make_shared<WithoutCancel>(messengers.a), {0, to_b, to_a}, std::move(sockets.a));
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(10); };
  CHECK(channel.begin(header_of(memory.size()), memory.data()));
  CHECK(!channel.release_memory(soon()));
}

}  // namespace

int main() {
  return run_tests({
      {"invalid envelopes are refused", invalid_envelopes_are_refused},
      {"envelopes without credit are refused", envelopes_without_credit_are_refused},
      {"chunks of a wrong length are refused", chunks_of_a_wrong_length_are_refused},
      {"a chunk that is too long closes the channel", a_chunk_that_is_too_long_closes_the_channel},
      {"random envelopes do no harm", random_envelopes_do_no_harm},
      {"a sender stops when its credit is used up", a_sender_stops_when_its_credit_is_used_up},
      {"a point-to-point message is one message of the library",
       a_point_to_point_message_is_one_message_of_the_library},
      {"a point-to-point message lies in one piece", a_point_to_point_message_lies_in_one_piece},
      {"release memory ends transfers in flight", release_memory_ends_transfers_in_flight},
      {"release memory reports memory that the library keeps", release_memory_reports_memory_that_the_library_keeps},
  });
}
