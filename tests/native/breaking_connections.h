// Messages between two TCP channels whose connections break.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "tcp/tcp_channel.h"

namespace unisono::testing {

// Lets a stream of two channels go on over another connection, as tcp/resumption.py does.
inline void reconnect(TcpChannel& a, TcpChannel& b, std::uint32_t stream, ConnectionPair ends) {
  const auto of_a = a.retire({stream, 1000});
  const auto of_b = b.retire({stream, 1000});
  CHECK(of_a && of_b && of_a->resumptions == of_b->resumptions);
  CHECK(a.resume(stream, std::move(ends.a), {of_a->resumptions + 1, of_b->received}));
  CHECK(b.resume(stream, std::move(ends.b), {of_a->resumptions + 1, of_a->received}));
}

// Passes random messages from one channel to another, whose connections break again and again. `connect` makes two
// ends of a connection.
inline void pass_messages_over_breaking_connections(const std::function<ConnectionPair()>& connect) {
  using Bytes = std::vector<std::byte>;
  Dice dice(31);
  std::size_t breaks = 0;
  for (int round = 0; round < 40; ++round) {
    const TcpTerms terms{0, dice.below(3) == 0};
    std::vector<Connection> ours, theirs;
    const std::size_t streams = 1 + dice.below(3);
    for (std::size_t i = 0; i < streams; ++i) {
      ConnectionPair ends = connect();
      ours.push_back(std::move(ends.a));
      theirs.push_back(std::move(ends.b));
    }
    TcpChannel sender(1, std::move(ours), terms);
    TcpChannel receiver(1, std::move(theirs), terms);
    Bytes memory(1 << 20);  // of the sender, who uses it for all messages
    std::vector<Bytes> messages(5);
    for (Bytes& message : messages) {
      message.resize(dice.below(4) == 0 ? dice.below(100) : dice.below(700'000));
      for (std::byte& byte : message) byte = static_cast<std::byte>(dice.word());
    }
    std::size_t sending = 0, sent = 0, receiving = 0;
    bool begun = false;
    Bytes received;
    std::size_t got = 0;
    const auto send_some = [&] {
      if (sending == messages.size()) return;
      const Bytes& message = messages[sending];
      if (!begun) {
        std::copy(message.begin(), message.end(), memory.begin());
        sender.begin(Header{11, message.size(), 22, 44, 33, kind_collective},
                     dice.below(2) == 0 ? Whole(memory.data()) : Whole());
        begun = true;
      }
      sent += sender.write(memory.data() + sent, std::min(message.size() - sent, 1 + dice.below(400'000)));
      if (sent != message.size() || !sender.flush()) return;
      ++sending;
      sent = 0;
      begun = false;
    };
    const auto receive_some = [&] {
      const Header* header = receiver.front();
      if (header == nullptr) return;
      received.resize(header->nbytes);
      if (header->nbytes == 0) receiver.consume(0);
      got += receiver.read(received.data() + got, std::min(received.size() - got, 1 + dice.below(400'000)));
      if (got != received.size()) return;
      CHECK(received == messages[receiving]);
      ++receiving;
      got = 0;
    };
    CHECK(eventually([&] {
      for (std::size_t i = dice.below(3); i > 0; --i) send_some();
      for (std::size_t i = dice.below(3); i > 0; --i) receive_some();
      if (dice.below(6) == 0) {
        reconnect(sender, receiver, static_cast<std::uint32_t>(dice.below(streams)), connect());
        ++breaks;
      }
      sender.flush();
      return receiving == messages.size();
    }));
  }
  CHECK(breaks > 100);
}

}  // namespace unisono::testing
