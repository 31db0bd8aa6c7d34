//! TLS 1.3 on a connected socket, by OpenSSL.
//!
//! Theory of operation. Both ends have proved by the handshake of Unisono (links/handshake.py) that they hold the key
//! of the job, before OpenSSL reads a byte. From that handshake both derive a secret that no other connection has.
//! Without certificates, the secret is the pre-shared key of TLS (RFC 8446, 2.2). With certificates, each end proves by
//! its own that the authority of the job knows it. Each connection agrees on fresh keys by Diffie-Hellman in both
//! cases, so the key of the job does not decrypt traffic that was recorded before.
//!
//! Here the caller sees bytes before encryption and after decryption, by functions like those of a nonblocking socket.
//! Encrypted bytes that the socket does not take wait in this object, and count as sent. `send` encrypts no more bytes
//! until the socket has taken these. OpenSSL reads ahead: bytes may wait in its buffer although the socket has none, so
//! a thread that is about to sleep until the socket can be read must ask `may_have_data` first.
//!
//! A connection ends as one without TLS: by the end of its TCP connection. An attacker who ends that one early gains
//! nothing, because messages have lengths, and a rank that leaves says so.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tcp/openssl.h"

namespace unisono {

//! The paths of PEM files; all empty for none.
struct TlsFiles {
  std::string certificate;  // of this rank, with those between it and the authority
  std::string key;          // the private key of the certificate
  std::string authority;    // the certificates that sign those of all ranks
};

//! The settings and keys that all TLS connections of a process have in common. Connections may be made in several
//! threads at a time.
class TlsContext {
 public:
  //! AES-GCM keeps its margin for 2^24.5 records of one key (RFC 8446, 5.5).
  static constexpr std::uint64_t most_records = std::uint64_t{1} << 23;

  //! After `records` a sender takes another key. Throws TlsError if there is no OpenSSL, or if a file cannot be used.
  explicit TlsContext(const TlsFiles& files, std::uint64_t records = most_records);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  //! Returns the public key of this rank's certificate in DER (SubjectPublicKeyInfo of RFC 5280); empty without one.
  std::vector<std::byte> public_key() const;

 private:
  friend class Tls;
  void use(const TlsFiles& files);

  const openssl::Library& ssl_;
  openssl::Context* context_;
  const bool has_certificates_;
  const std::uint64_t records_per_key_;
};

//! The TLS of one connection. One thread uses it at a time.
class Tls {
 public:
  enum class Side : std::uint8_t { client, server };
  static constexpr std::size_t secret_nbytes = 32;
  //! The most bytes of a TLS record before encryption. A record is decrypted as a whole or not at all.
  static constexpr std::size_t most_record_nbytes = 16 << 10;
  using Secret = std::array<std::byte, secret_nbytes>;

  //! Uses a connected socket, which the caller keeps open. `secret`: equal on both ends, and on no other connection.
  Tls(std::shared_ptr<const TlsContext> context, int socket, Side side, const Secret& secret);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  //! Goes on with the handshake of TLS as far as is possible now; true once it is complete. Throws TlsError if the
  //! other end is refused or refuses, and std::system_error if the connection breaks.
  bool handshake();
  //! Returns a secret of this TLS connection that both ends know and nobody between them does (RFC 8446, 7.5).
  Secret exported() const;
  //! Returns the public key of the other end's certificate, as `TlsContext::public_key`. Call it after the handshake.
  std::vector<std::byte> public_key_of_peer() const;

  //! Encrypts and sends up to `nbytes`, and returns how many it took. Like ::send, it returns -1 and sets errno on
  //! failure, and EAGAIN if it can take none now.
  ssize_t send(const std::byte* data, std::size_t nbytes);
  //! Sends encrypted bytes that wait. Returns 0 when none waits any more, otherwise the errno of ::send.
  int flush();
  //! The number of encrypted bytes that wait.
  std::size_t unsent_nbytes() const { return out_.size() - out_sent_; }
  //! Receives and decrypts up to `nbytes`: all that have arrived, if they fit. Like ::recv, it returns 0 at the end of
  //! the connection, and -1 with errno on failure; EBADMSG says that TLS failed, for the reason in `error`.
  ssize_t receive(std::byte* data, std::size_t nbytes);
  //! The reason why TLS failed after its handshake; empty if it has not.
  const std::string& error() const { return error_; }
  //! Whether `receive` may have bytes although the socket has none.
  bool may_have_data() const;

 private:
  int read(char* data, int nbytes);
  int write(const char* data, int nbytes);
  void update_key(std::size_t nbytes);
  openssl::Session* new_session(openssl::Connection* connection) const;
  std::string failure() const;
  static int on_read(openssl::Bio* bio, char* data, int nbytes);
  static int on_write(openssl::Bio* bio, const char* data, int nbytes);
  static long on_control(openssl::Bio* bio, int command, long number, void* pointer);
  static int on_use_session(openssl::Connection* connection, const void* hash, const unsigned char** identity,
                            std::size_t* nbytes, openssl::Session** session);
  static int on_find_session(openssl::Connection* connection, const unsigned char* identity, std::size_t nbytes,
                             openssl::Session** session);
  static const openssl::BioMethod* bio_method(const openssl::Library& ssl);

  std::shared_ptr<const TlsContext> context_;
  const openssl::Library& ssl_;
  int socket_;
  Secret secret_;
  openssl::Connection* connection_;
  std::vector<char> out_;
  std::size_t out_sent_ = 0;
  std::uint64_t records_ = 0;  // encrypted by the present key
  int end_ = -1;               // the errno that ended reading, 0 for an orderly end; -1 before
  std::string error_;
  bool drained_ = false;  // OpenSSL's buffer holds no complete record
};

}  // namespace unisono
