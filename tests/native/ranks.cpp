#include "ranks.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "check.h"
#include "exchange.h"
#include "shm/shm_channel.h"
#include "tagged/tagged_channel.h"
#include "tcp/tcp_channel.h"

namespace unisono::testing {
namespace {

Descriptor copy_of(const Descriptor& original) { return Descriptor(::dup(original.get())); }

std::shared_ptr<const TlsContext> tls_context() {
  static const auto context = std::make_shared<const TlsContext>(TlsFiles{});
  return context;
}

ChannelPair tcp_channel_pair(Transport transport, std::int32_t a, std::int32_t b) {
  std::vector<Connection> ends_of_a;
  std::vector<Connection> ends_of_b;
  const int streams = transport == Transport::checked ? 3 : transport == Transport::encrypted ? 2 : 1;
  for (int stream = 0; stream < streams; ++stream) {
    ConnectionPair ends =
        transport == Transport::encrypted ? encrypted(tcp_pair(), tls_context()) : unencrypted(tcp_pair());
    ends_of_a.push_back(std::move(ends.a));
    ends_of_b.push_back(std::move(ends.b));
  }
  const TcpTerms terms{3, transport == Transport::checked};
  return {std::make_unique<TcpChannel>(b, std::move(ends_of_a), terms),
          std::make_unique<TcpChannel>(a, std::move(ends_of_b), terms), Descriptor()};
}

ChannelPair tagged_channel_pair(std::int32_t a, std::int32_t b) {
  MessengerPair messengers = messenger_pair();
  SocketPair sockets = unix_pair();
  const std::uint64_t to_a = messengers.a->reserve();
  const std::uint64_t to_b = messengers.b->reserve();
  return {std::make_unique<TaggedChannel>(b, messengers.a, TaggedChannel::Route{0, to_b, to_a}, std::move(sockets.a)),
          std::make_unique<TaggedChannel>(a, messengers.b, TaggedChannel::Route{0, to_a, to_b}, std::move(sockets.b)),
          Descriptor()};
}

}  // namespace

SocketPair unix_pair() {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

SocketPair tcp_pair(const char* host_of_a) {
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof address;
  auto* place = reinterpret_cast<sockaddr*>(&address);
  CHECK(::bind(listener.get(), place, nbytes) == 0 && ::listen(listener.get(), 1) == 0);
  CHECK(::getsockname(listener.get(), place, &nbytes) == 0);
  Descriptor a(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in from{};
  from.sin_family = AF_INET;
  CHECK(::inet_pton(AF_INET, host_of_a, &from.sin_addr) == 1);
  CHECK(::bind(a.get(), reinterpret_cast<sockaddr*>(&from), sizeof from) == 0);
  CHECK(::connect(a.get(), place, nbytes) == 0);
  Descriptor b(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const int on = 1;
  for (const Descriptor* end : {&a, &b}) CHECK(::setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  return {std::move(a), std::move(b)};
}

ConnectionPair unencrypted(SocketPair sockets) { return {std::move(sockets.a), std::move(sockets.b)}; }

Tls::Secret secret_of(std::uint8_t byte) {
  Tls::Secret secret;
  secret.fill(std::byte{byte});
  return secret;
}

ConnectionPair encrypted(SocketPair sockets, const std::shared_ptr<const TlsContext>& context) {
  auto client = std::make_unique<Tls>(context, sockets.a.get(), Tls::Side::client, secret_of(7));
  auto server = std::make_unique<Tls>(context, sockets.b.get(), Tls::Side::server, secret_of(7));
  CHECK(eventually([&] {
    const bool is_ready = client->handshake();
    return server->handshake() && is_ready;
  }));
  CHECK(client->exported() == server->exported());
  return {{std::move(sockets.a), std::move(client)}, {std::move(sockets.b), std::move(server)}};
}

Descriptor sealed_memory() {
  Descriptor memory(::memfd_create("unisono-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(::ftruncate(memory.get(), static_cast<off_t>(ShmChannel::segment_nbytes())) == 0);
  CHECK(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
  return memory;
}

ChannelPair channel_pair(Transport transport, std::int32_t a, std::int32_t b, std::int32_t peers) {
  if (transport == Transport::tagged) return tagged_channel_pair(a, b);
  if (transport != Transport::shm) return tcp_channel_pair(transport, a, b);
  SocketPair sockets = unix_pair();
  Descriptor memory = sealed_memory();
  const Descriptor bell_a(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const Descriptor bell_b(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return {std::make_unique<ShmChannel>(b, peers, true, copy_of(memory), copy_of(bell_a), copy_of(bell_b),
                                       std::move(sockets.a)),
          std::make_unique<ShmChannel>(a, peers, false, copy_of(memory), copy_of(bell_b), copy_of(bell_a),
                                       std::move(sockets.b)),
          std::move(memory)};
}

Ranks::Ranks(std::int32_t size, Transport transport, std::int64_t lanes) {
  for (std::int32_t rank = 0; rank < size; ++rank) {
    controls_.push_back(std::make_shared<Control>(rank, size, 1000));
    endpoints_.push_back(std::make_unique<Endpoint>(controls_.back(), communicator, true));
  }
  for (std::int32_t judge = 0; judge < std::min(size, 2); ++judge) {
    for (std::int32_t rank = judge + 1; rank < size; ++rank) {
      ConnectionPair link =
          transport == Transport::encrypted ? encrypted(unix_pair(), tls_context()) : unencrypted(unix_pair());
      controls_[static_cast<std::size_t>(judge)]->add_link(rank, std::move(link.a), Descriptor());
      controls_[static_cast<std::size_t>(rank)]->add_link(judge, std::move(link.b), Descriptor());
    }
  }
  for (std::int32_t a = 0; a < size; ++a)
    for (std::int32_t b = 0; b < a; ++b) connect(a, b, transport, lanes);
}

void Ranks::connect(std::int32_t a, std::int32_t b, Transport transport, std::int64_t lanes) {
  const auto join = [&](std::int64_t lane_of_a, std::int64_t lane_of_b) {
    ChannelPair pair = channel_pair(transport, a, b, size() - 1);
    endpoint(a).add_channel(lane_of_a, std::move(pair.a));
    endpoint(b).add_channel(lane_of_b, std::move(pair.b));
  };
  for (std::int64_t lane = 0; lane < lanes; ++lane) join(lane, lane);
  join(ChannelTable::sending_lane, ChannelTable::receiving_lane);
  join(ChannelTable::receiving_lane, ChannelTable::sending_lane);
}

void Ranks::run(const std::function<void(std::int32_t, Endpoint&)>& body) {
  std::vector<std::exception_ptr> errors(endpoints_.size());
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, endpoint(rank));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        control(rank).fail({FailureKind::aborted, rank, -1, -1, error.what()});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

bool eventually(const std::function<bool()>& condition) {
  using namespace std::chrono_literals;
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

CompiledCall compile(std::span<const std::int64_t> words, const Extent& extent, std::int64_t segments,
                     std::uint64_t digest) {
  auto plan = std::make_shared<const Plan>(words);
  AllBlocks blocks{Blocks::even(extent.count, plan->partition(BufferKind::input).blocks),
                   Blocks::even(extent.count, plan->partition(BufferKind::output).blocks), Blocks()};
  blocks[2] = scratch_blocks(plan->scratch(), blocks);
  const std::vector<Extent> extents{extent};
  return {Program(std::move(plan), std::move(blocks), {extents, extents}, segments), digest,
          description("allreduce #" + std::to_string(digest))};
}

}  // namespace unisono::testing
