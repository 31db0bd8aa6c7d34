//! The functions of OpenSSL that TLS needs. They are looked up at run time, so Unisono needs no OpenSSL where TLS is
//! not used, and uses the system's own, with its security updates, where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace unisono {

//! TLS cannot be used, or the other end of a connection fails a check: it lacks the key of the job, or its certificate
//! is refused.
struct TlsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

//! Types and constants from openssl/ssl.h and openssl/bio.h, which are part of the ABI of libssl.so.3.
namespace openssl {

struct Context;     // SSL_CTX
struct Connection;  // SSL
struct Session;     // SSL_SESSION
struct Cipher;      // SSL_CIPHER
struct Bio;         // BIO
struct BioMethod;   // BIO_METHOD
struct X509;        // X509
struct PublicKey;   // X509_PUBKEY

using UseSession = int (*)(Connection*, const void* hash, const unsigned char** identity, std::size_t*, Session**);
using FindSession = int (*)(Connection*, const unsigned char* identity, std::size_t, Session**);
using Password = int (*)(char*, int, int, void*);

inline constexpr int version_tls_1_3 = 0x0304;
inline constexpr int ctrl_set_session_cache_mode = 44;
inline constexpr int ctrl_set_min_version = 123;
inline constexpr int ctrl_set_max_version = 124;
inline constexpr std::uint64_t init_without_exit_handler = 0x00080000;
inline constexpr int verify_peer_or_fail = 0x01 | 0x02;
inline constexpr int file_is_pem = 1;
inline constexpr int error_want_read = 2;
inline constexpr int update_own_key = 0;
inline constexpr int bio_is_source_and_sink = 0x0400;
inline constexpr int bio_flush = 11;
inline constexpr int bio_flags_read = 0x01;
inline constexpr int bio_flags_should_retry = 0x08;
inline constexpr int bio_flags_retry = 0x0f;

// The functions of libssl and libcrypto that are looked up at run time: the name, the result and the parameters of
// each.
#define UNISONO_OPENSSL(FUNCTION)                                                           \
  FUNCTION(OPENSSL_init_ssl, int, (std::uint64_t, const void*))                             \
  FUNCTION(ERR_clear_error, void, ())                                                       \
  FUNCTION(ERR_get_error, unsigned long, ())                                                \
  FUNCTION(ERR_reason_error_string, const char*, (unsigned long))                           \
  FUNCTION(X509_verify_cert_error_string, const char*, (long))                              \
  FUNCTION(X509_get_X509_PUBKEY, PublicKey*, (const X509*))                                 \
  FUNCTION(i2d_X509_PUBKEY, int, (const PublicKey*, unsigned char**))                       \
  FUNCTION(BIO_get_new_index, int, ())                                                      \
  FUNCTION(BIO_meth_new, BioMethod*, (int, const char*))                                    \
  FUNCTION(BIO_meth_set_read, int, (BioMethod*, int (*)(Bio*, char*, int)))                 \
  FUNCTION(BIO_meth_set_write, int, (BioMethod*, int (*)(Bio*, const char*, int)))          \
  FUNCTION(BIO_meth_set_ctrl, int, (BioMethod*, long (*)(Bio*, int, long, void*)))          \
  FUNCTION(BIO_new, Bio*, (const BioMethod*))                                               \
  FUNCTION(BIO_set_data, void, (Bio*, void*))                                               \
  FUNCTION(BIO_get_data, void*, (Bio*))                                                     \
  FUNCTION(BIO_set_init, void, (Bio*, int))                                                 \
  FUNCTION(BIO_set_flags, void, (Bio*, int))                                                \
  FUNCTION(BIO_clear_flags, void, (Bio*, int))                                              \
  FUNCTION(TLS_method, const void*, ())                                                     \
  FUNCTION(SSL_CTX_new, Context*, (const void*))                                            \
  FUNCTION(SSL_CTX_free, void, (Context*))                                                  \
  FUNCTION(SSL_CTX_ctrl, long, (Context*, int, long, void*))                                \
  FUNCTION(SSL_CTX_set_ciphersuites, int, (Context*, const char*))                          \
  FUNCTION(SSL_CTX_set_num_tickets, int, (Context*, std::size_t))                           \
  FUNCTION(SSL_CTX_set_session_id_context, int, (Context*, const unsigned char*, unsigned)) \
  FUNCTION(SSL_CTX_set_default_read_buffer_len, void, (Context*, std::size_t))              \
  FUNCTION(SSL_CTX_set_verify, void, (Context*, int, void*))                                \
  FUNCTION(SSL_CTX_set_default_passwd_cb, void, (Context*, Password))                       \
  FUNCTION(SSL_CTX_use_certificate_chain_file, int, (Context*, const char*))                \
  FUNCTION(SSL_CTX_use_PrivateKey_file, int, (Context*, const char*, int))                  \
  FUNCTION(SSL_CTX_load_verify_locations, int, (Context*, const char*, const char*))        \
  FUNCTION(SSL_CTX_get0_certificate, X509*, (const Context*))                               \
  FUNCTION(SSL_CIPHER_find, const Cipher*, (Connection*, const unsigned char*))             \
  FUNCTION(SSL_SESSION_new, Session*, ())                                                   \
  FUNCTION(SSL_SESSION_set1_master_key, int, (Session*, const unsigned char*, std::size_t)) \
  FUNCTION(SSL_SESSION_set1_id_context, int, (Session*, const unsigned char*, unsigned))    \
  FUNCTION(SSL_SESSION_set_cipher, int, (Session*, const Cipher*))                          \
  FUNCTION(SSL_SESSION_set_protocol_version, int, (Session*, int))                          \
  FUNCTION(SSL_new, Connection*, (Context*))                                                \
  FUNCTION(SSL_free, void, (Connection*))                                                   \
  FUNCTION(SSL_set_bio, void, (Connection*, Bio*, Bio*))                                    \
  FUNCTION(SSL_set_read_ahead, void, (Connection*, int))                                    \
  FUNCTION(SSL_set_connect_state, void, (Connection*))                                      \
  FUNCTION(SSL_set_accept_state, void, (Connection*))                                       \
  FUNCTION(SSL_set_ex_data, int, (Connection*, int, void*))                                 \
  FUNCTION(SSL_get_ex_data, void*, (const Connection*, int))                                \
  FUNCTION(SSL_set_psk_use_session_callback, void, (Connection*, UseSession))               \
  FUNCTION(SSL_set_psk_find_session_callback, void, (Connection*, FindSession))             \
  FUNCTION(SSL_do_handshake, int, (Connection*))                                            \
  FUNCTION(SSL_session_reused, int, (const Connection*))                                    \
  FUNCTION(SSL_get_verify_result, long, (const Connection*))                                \
  FUNCTION(SSL_get0_peer_certificate, X509*, (const Connection*))                           \
  FUNCTION(SSL_get_error, int, (const Connection*, int))                                    \
  FUNCTION(SSL_read_ex, int, (Connection*, void*, std::size_t, std::size_t*))               \
  FUNCTION(SSL_write_ex, int, (Connection*, const void*, std::size_t, std::size_t*))        \
  FUNCTION(SSL_has_pending, int, (const Connection*))                                       \
  FUNCTION(SSL_key_update, int, (Connection*, int))                                         \
  FUNCTION(                                                                                 \
      SSL_export_keying_material, int,                                                      \
      (Connection*, unsigned char*, std::size_t, const char*, std::size_t, const unsigned char*, std::size_t, int))

//! The functions of the loaded library.
struct Library {
#define UNISONO_OPENSSL_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  UNISONO_OPENSSL(UNISONO_OPENSSL_MEMBER)
#undef UNISONO_OPENSSL_MEMBER

  //! Returns the oldest error of this thread in words, and forgets all of them.
  const char* take_error() const;
};

//! Returns the library, which the first call loads. Throws TlsError if the system has none.
const Library& library();

}  // namespace openssl
}  // namespace unisono
