#include "tcp/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

namespace unisono {
namespace {

// Both hash by SHA-256, as a pre-shared key of either demands.
constexpr const char* cipher_suites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char cipher_of_secret[] = {0x13, 0x01};
constexpr std::string_view identity_of_secret = "unisono";
constexpr std::string_view label_of_export = "EXPORTER-unisono";
// At most this many bytes are encrypted before they are sent. They and their copies fit the second-level cache.
constexpr std::size_t most_encrypted_nbytes = 128 << 10;
// OpenSSL reads at most this many bytes at once. Each connection has a buffer for them.
constexpr std::size_t read_buffer_nbytes = 64 << 10;

const unsigned char* octets(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
const unsigned char* octets(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

bool is_passing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// A key file with a password must not ask for it at the terminal.
int no_password(char*, int, int, void*) { return -1; }

std::vector<std::byte> public_key_of(const openssl::Library& ssl, const openssl::X509* certificate) {
  if (certificate == nullptr) return {};
  const openssl::PublicKey* key = ssl.X509_get_X509_PUBKEY(certificate);
  const int nbytes = ssl.i2d_X509_PUBKEY(key, nullptr);
  if (nbytes <= 0) throw TlsError(std::string("the public key of a certificate cannot be read: ") + ssl.take_error());
  std::vector<std::byte> der(static_cast<std::size_t>(nbytes));
  auto* place = reinterpret_cast<unsigned char*>(der.data());
  ssl.i2d_X509_PUBKEY(key, &place);
  return der;
}

}  // namespace

TlsContext::TlsContext(const TlsFiles& files, std::uint64_t records)
    : ssl_(openssl::library()),
      context_(ssl_.SSL_CTX_new(ssl_.TLS_method())),
      has_certificates_(!files.certificate.empty()),
      records_per_key_(records) {
  if (context_ == nullptr) throw TlsError(std::string("OpenSSL cannot be used: ") + ssl_.take_error());
  ssl_.SSL_CTX_ctrl(context_, openssl::ctrl_set_min_version, openssl::version_tls_1_3, nullptr);
  ssl_.SSL_CTX_ctrl(context_, openssl::ctrl_set_max_version, openssl::version_tls_1_3, nullptr);
  ssl_.SSL_CTX_ctrl(context_, openssl::ctrl_set_session_cache_mode, 0, nullptr);
  ssl_.SSL_CTX_set_num_tickets(context_, 0);
  ssl_.SSL_CTX_set_default_read_buffer_len(context_, read_buffer_nbytes);
  ssl_.SSL_CTX_set_verify(context_, openssl::verify_peer_or_fail, nullptr);
  ssl_.SSL_CTX_set_session_id_context(context_, octets(identity_of_secret), identity_of_secret.size());
  try {
    if (ssl_.SSL_CTX_set_ciphersuites(context_, cipher_suites) != 1)
      throw TlsError(std::string("OpenSSL lacks the ciphers of TLS 1.3: ") + ssl_.take_error());
    if (has_certificates_) use(files);
  } catch (...) {
    ssl_.SSL_CTX_free(context_);
    throw;
  }
}

TlsContext::~TlsContext() { ssl_.SSL_CTX_free(context_); }

void TlsContext::use(const TlsFiles& files) {
  ssl_.ERR_clear_error();
  ssl_.SSL_CTX_set_default_passwd_cb(context_, no_password);
  const auto check = [this](int is_usable, const char* what, const std::string& path) {
    if (is_usable != 1) throw TlsError(std::string(what) + " " + path + " cannot be used: " + ssl_.take_error());
  };
  check(ssl_.SSL_CTX_use_certificate_chain_file(context_, files.certificate.c_str()), "the certificate",
        files.certificate);
  check(ssl_.SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), openssl::file_is_pem), "the key", files.key);
  check(ssl_.SSL_CTX_load_verify_locations(context_, files.authority.c_str(), nullptr), "the authority",
        files.authority);
}

std::vector<std::byte> TlsContext::public_key() const {
  return has_certificates_ ? public_key_of(ssl_, ssl_.SSL_CTX_get0_certificate(context_)) : std::vector<std::byte>();
}

Tls::Tls(std::shared_ptr<const TlsContext> context, int socket, Side side, const Secret& secret)
    : context_(std::move(context)),
      ssl_(context_->ssl_),
      socket_(socket),
      secret_(secret),
      connection_(ssl_.SSL_new(context_->context_)) {
  openssl::Bio* bio = connection_ == nullptr ? nullptr : ssl_.BIO_new(bio_method(ssl_));
  if (bio == nullptr) {
    if (connection_ != nullptr) ssl_.SSL_free(connection_);
    throw TlsError(std::string("OpenSSL cannot be used: ") + ssl_.take_error());
  }
  ssl_.BIO_set_data(bio, this);
  ssl_.BIO_set_init(bio, 1);
  ssl_.SSL_set_bio(connection_, bio, bio);  // which takes it over
  ssl_.SSL_set_read_ahead(connection_, 1);
  ssl_.SSL_set_ex_data(connection_, 0, this);
  if (!context_->has_certificates_) {
    ssl_.SSL_set_psk_use_session_callback(connection_, on_use_session);
    ssl_.SSL_set_psk_find_session_callback(connection_, on_find_session);
  }
  side == Side::client ? ssl_.SSL_set_connect_state(connection_) : ssl_.SSL_set_accept_state(connection_);
}

Tls::~Tls() { ssl_.SSL_free(connection_); }

bool Tls::handshake() {
  ssl_.ERR_clear_error();
  const int result = ssl_.SSL_do_handshake(connection_);
  const int why = ssl_.SSL_get_error(connection_, result);
  const bool is_refused = result != 1 && why != openssl::error_want_read && end_ < 0;
  const std::string text = is_refused ? failure() : "";
  const int error = flush();  // also the alert that says to the other end why it is refused
  if (is_refused) throw TlsError(text);
  if (end_ >= 0)
    throw std::system_error(end_ == 0 ? ECONNRESET : end_, std::generic_category(), "the handshake of TLS");
  // A new connection has room for these few bytes.
  if (error != 0) throw std::system_error(error, std::generic_category(), "the handshake of TLS");
  if (result != 1) return false;
  if (!context_->has_certificates_ && ssl_.SSL_session_reused(connection_) != 1)
    throw TlsError("the other end does not use the key of the job");
  return true;
}

std::string Tls::failure() const {
  const long verdict = ssl_.SSL_get_verify_result(connection_);
  const char* text = ssl_.take_error();
  if (!context_->has_certificates_ || verdict == 0 || std::string_view(text) != "certificate verify failed")
    return text;
  return std::string(text) + ": " + ssl_.X509_verify_cert_error_string(verdict);
}

Tls::Secret Tls::exported() const {
  Secret secret;
  if (ssl_.SSL_export_keying_material(connection_, reinterpret_cast<unsigned char*>(secret.data()), secret.size(),
                                      label_of_export.data(), label_of_export.size(), nullptr, 0, 0) != 1)
    throw TlsError(std::string("OpenSSL exports no secret: ") + ssl_.take_error());
  return secret;
}

std::vector<std::byte> Tls::public_key_of_peer() const {
  return public_key_of(ssl_, ssl_.SSL_get0_peer_certificate(connection_));
}

ssize_t Tls::send(const std::byte* data, std::size_t nbytes) {
  if (const int error = flush(); error != 0) {
    errno = error;
    return -1;
  }
  const std::size_t most = std::min(nbytes, most_encrypted_nbytes);
  std::size_t taken = 0;
  while (taken < most) {
    ssl_.ERR_clear_error();
    update_key(most - taken);
    std::size_t written = 0;
    if (ssl_.SSL_write_ex(connection_, data + taken, most - taken, &written) != 1) {
      errno = EBADMSG;
      return -1;
    }
    taken += written;
  }
  if (const int error = flush(); error != 0 && !is_passing(error)) {
    errno = error;
    return -1;
  }
  return static_cast<ssize_t>(taken);
}

// Counts the records of the next `nbytes`, and lets a new key encrypt them if the present one has encrypted enough.
void Tls::update_key(std::size_t nbytes) {
  records_ += nbytes / most_record_nbytes + 1;
  if (records_ < context_->records_per_key_) return;
  records_ = 0;
  ssl_.SSL_key_update(connection_, openssl::update_own_key);
}

int Tls::flush() {
  while (out_sent_ < out_.size()) {
    const auto sent = ::send(socket_, out_.data() + out_sent_, out_.size() - out_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno;
    out_sent_ += static_cast<std::size_t>(sent);
  }
  out_.clear();
  out_sent_ = 0;
  return 0;
}

ssize_t Tls::receive(std::byte* data, std::size_t nbytes) {
  std::size_t got = 0;
  drained_ = false;
  while (got < nbytes) {
    ssl_.ERR_clear_error();
    std::size_t part = 0;
    if (ssl_.SSL_read_ex(connection_, data + got, nbytes - got, &part) == 1) {
      got += part;
      continue;
    }
    drained_ = true;
    if (ssl_.SSL_get_error(connection_, 0) == openssl::error_want_read) {
      errno = EAGAIN;
    } else {
      if (end_ < 0) {
        end_ = EBADMSG;
        error_ = failure();
      }
      errno = end_;
    }
    if (got == 0) return errno == 0 ? 0 : -1;
    break;
  }
  return static_cast<ssize_t>(got);
}

bool Tls::may_have_data() const { return !drained_ && ssl_.SSL_has_pending(connection_) == 1; }

// OpenSSL reads from the socket.
int Tls::read(char* data, int nbytes) {
  if (end_ >= 0) return 0;
  const auto got = ::recv(socket_, data, static_cast<std::size_t>(nbytes), MSG_DONTWAIT);
  if (got > 0) return static_cast<int>(got);
  if (got < 0 && is_passing(errno)) return -1;
  end_ = got == 0 ? 0 : errno;
  return 0;
}

// OpenSSL writes encrypted bytes, all of which wait for `flush`.
int Tls::write(const char* data, int nbytes) {
  out_.insert(out_.end(), data, data + nbytes);
  return nbytes;
}

int Tls::on_read(openssl::Bio* bio, char* data, int nbytes) {
  const openssl::Library& ssl = openssl::library();
  ssl.BIO_clear_flags(bio, openssl::bio_flags_retry);
  const int got = static_cast<Tls*>(ssl.BIO_get_data(bio))->read(data, nbytes);
  if (got < 0) ssl.BIO_set_flags(bio, openssl::bio_flags_read | openssl::bio_flags_should_retry);
  return got;
}

int Tls::on_write(openssl::Bio* bio, const char* data, int nbytes) {
  return static_cast<Tls*>(openssl::library().BIO_get_data(bio))->write(data, nbytes);
}

long Tls::on_control(openssl::Bio*, int command, long, void*) { return command == openssl::bio_flush ? 1 : 0; }

const openssl::BioMethod* Tls::bio_method(const openssl::Library& ssl) {
  static const openssl::BioMethod* method = [&ssl] {
    openssl::BioMethod* made = ssl.BIO_meth_new(ssl.BIO_get_new_index() | openssl::bio_is_source_and_sink, "unisono");
    if (made == nullptr) throw TlsError(std::string("OpenSSL cannot be used: ") + ssl.take_error());
    ssl.BIO_meth_set_read(made, on_read);
    ssl.BIO_meth_set_write(made, on_write);
    ssl.BIO_meth_set_ctrl(made, on_control);
    return made;
  }();
  return method;
}

// Returns a session that was never used for a connection: OpenSSL takes a pre-shared key in this form.
openssl::Session* Tls::new_session(openssl::Connection* connection) const {
  openssl::Session* session = ssl_.SSL_SESSION_new();
  if (session == nullptr) return nullptr;
  ssl_.SSL_SESSION_set1_master_key(session, octets(secret_.data()), secret_.size());
  ssl_.SSL_SESSION_set_cipher(session, ssl_.SSL_CIPHER_find(connection, cipher_of_secret));
  ssl_.SSL_SESSION_set1_id_context(session, octets(identity_of_secret), identity_of_secret.size());
  ssl_.SSL_SESSION_set_protocol_version(session, openssl::version_tls_1_3);
  return session;
}

int Tls::on_use_session(openssl::Connection* connection, const void*, const unsigned char** identity,
                        std::size_t* nbytes, openssl::Session** session) {
  *identity = octets(identity_of_secret);
  *nbytes = identity_of_secret.size();
  const auto* tls = static_cast<Tls*>(openssl::library().SSL_get_ex_data(connection, 0));
  *session = tls->new_session(connection);
  return *session == nullptr ? 0 : 1;
}

int Tls::on_find_session(openssl::Connection* connection, const unsigned char* identity, std::size_t nbytes,
                         openssl::Session** session) {
  const bool is_ours = std::string_view(reinterpret_cast<const char*>(identity), nbytes) == identity_of_secret;
  const auto* tls = static_cast<Tls*>(openssl::library().SSL_get_ex_data(connection, 0));
  *session = is_ours ? tls->new_session(connection) : nullptr;
  return !is_ours || *session != nullptr ? 1 : 0;
}

}  // namespace unisono
