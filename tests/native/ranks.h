// Ranks as threads of one process. Each has its own control and endpoint, with the links and channels of a real job.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "control/control.h"
#include "endpoint/endpoint.h"
#include "system/descriptor.h"
#include "tcp/connection.h"

namespace unisono::testing {

// `checked`: TCP over several streams with checksums. `tagged`: the library of exchange.h. `encrypted`: TCP over two
// streams with TLS, which also encrypts the control links; only where OpenSSL is.
enum class Transport { shm, tcp, checked, tagged, encrypted };
inline constexpr Transport transports[] = {Transport::shm, Transport::tcp, Transport::checked, Transport::tagged};

struct SocketPair {
  Descriptor a;
  Descriptor b;
};
SocketPair unix_pair();
SocketPair tcp_pair(const char* host_of_a = "127.0.0.1");  // over loopback, to 127.0.0.1

struct ConnectionPair {
  Connection a;
  Connection b;
};
ConnectionPair unencrypted(SocketPair sockets);
// `context` is of both ends.
ConnectionPair encrypted(SocketPair sockets, const std::shared_ptr<const TlsContext>& context);
// A secret for TLS, of this byte alone.
Tls::Secret secret_of(std::uint8_t byte);

struct ChannelPair {
  std::unique_ptr<Channel> a;  // from rank `a` to rank `b`
  std::unique_ptr<Channel> b;
  Descriptor memory;  // of shared memory, otherwise invalid
};
// `peers` is the number of peers that each of the two ranks has.
ChannelPair channel_pair(Transport transport, std::int32_t a, std::int32_t b, std::int32_t peers = 1);

// Returns shared memory for a channel, sealed as the channel requires.
Descriptor sealed_memory();

// A description of a call for the flight recorder.
inline SharedDescription description(std::string text) {
  return std::make_shared<const Description>(Description{std::move(text), "{}"});
}

// Ranks with a channel for each of `lanes` lanes between every two of them, and for messages in both directions.
class Ranks {
 public:
  static constexpr std::uint64_t communicator = 7;

  Ranks(std::int32_t size, Transport transport, std::int64_t lanes = 1);

  // Runs `body` for each rank in its own thread; rethrows the first error.
  void run(const std::function<void(std::int32_t rank, Endpoint& endpoint)>& body);
  Endpoint& endpoint(std::int32_t rank) { return *endpoints_[static_cast<std::size_t>(rank)]; }
  Control& control(std::int32_t rank) { return endpoint(rank).control(); }
  std::int32_t size() const { return static_cast<std::int32_t>(endpoints_.size()); }

 private:
  void connect(std::int32_t a, std::int32_t b, Transport transport, std::int64_t lanes);

  std::vector<std::shared_ptr<Control>> controls_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

// Waits until `condition` holds, for 20 s at most. Returns whether it holds.
bool eventually(const std::function<bool()>& condition);

// A call whose INPUT and OUTPUT have one extent each; `words` are its plan.
CompiledCall compile(std::span<const std::int64_t> words, const Extent& extent, std::int64_t segments,
                     std::uint64_t digest = 1);

}  // namespace unisono::testing
