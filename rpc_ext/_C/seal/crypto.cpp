#include "seal/crypto.h"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

namespace rpc_ext {
namespace {

// The part of libcrypto's interface that has stood since OpenSSL 1.1: its headers are not needed to build.
struct Crypto {
  using Sha256 = const void* (*)();
  using New = void* (*)();
  using Free = void (*)(void*);
  using Init = int (*)(void*, const void*, int, const void*, void*);
  using Copy = int (*)(void*, void*);
  using Update = int (*)(void*, const unsigned char*, std::size_t);
  using Final = int (*)(void*, unsigned char*, unsigned*);
  using Cipher = const void* (*)();
  using EncryptInit = int (*)(void*, const void*, void*, const unsigned char*, const unsigned char*);
  using EncryptUpdate = int (*)(void*, unsigned char*, int*, const unsigned char*, int);
  using EncryptFinal = int (*)(void*, unsigned char*, int*);
  using Control = int (*)(void*, int, int, void*);

  Sha256 sha256;
  New make;
  Free free;
  Init init;
  Copy copy;
  Update update;
  Final final;
  Cipher aes_256_gcm;
  New make_cipher;
  Free free_cipher;
  EncryptInit encrypt_init;
  EncryptUpdate encrypt_update;
  EncryptFinal encrypt_final;
  Control control;

  static const Crypto& get() {
    static const Crypto crypto;
    return crypto;
  }

 private:
  Crypto() {
    void* const library = open();
    find(library, "EVP_sha256", sha256);
    find(library, "HMAC_CTX_new", make);
    find(library, "HMAC_CTX_free", free);
    find(library, "HMAC_Init_ex", init);
    find(library, "HMAC_CTX_copy", copy);
    find(library, "HMAC_Update", update);
    find(library, "HMAC_Final", final);
    find(library, "EVP_aes_256_gcm", aes_256_gcm);
    find(library, "EVP_CIPHER_CTX_new", make_cipher);
    find(library, "EVP_CIPHER_CTX_free", free_cipher);
    find(library, "EVP_EncryptInit_ex", encrypt_init);
    find(library, "EVP_EncryptUpdate", encrypt_update);
    find(library, "EVP_EncryptFinal_ex", encrypt_final);
    find(library, "EVP_CIPHER_CTX_ctrl", control);
  }

  static void* open() {
    for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {  // the one that is loaded already, if any
      for (const char* const name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
        if (void* const library = ::dlopen(name, flags)) return library;
      }
    }
    throw std::runtime_error("no libcrypto was found, which computes the seals of messages: install OpenSSL");
  }

  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the libcrypto that was found has no ") + name);
  }
};

void check(int succeeded) {
  if (succeeded != 1) throw std::runtime_error("libcrypto could not compute the code of a message");
}

void* made(Crypto::New make) {
  void* const context = make();
  if (!context) throw std::bad_alloc();
  return context;
}

struct ScratchContext {
  void* const context = made(Crypto::get().make);
  ~ScratchContext() { Crypto::get().free(context); }
};

struct ScratchCipher {
  void* const context = made(Crypto::get().make_cipher);
  ~ScratchCipher() { Crypto::get().free_cipher(context); }
};

void* scratch_cipher() {
  thread_local const ScratchCipher scratch;
  return scratch.context;
}

}  // namespace

HmacKey::HmacKey(std::string_view key) : keyed_(made(Crypto::get().make)) {
  const Crypto& crypto = Crypto::get();
  check(crypto.init(keyed_, key.data(), static_cast<int>(key.size()), crypto.sha256(), nullptr));
}

HmacKey::~HmacKey() { Crypto::get().free(keyed_); }

Digest HmacKey::of(std::initializer_list<std::string_view> parts) const {
  thread_local const ScratchContext scratch;
  const Crypto& crypto = Crypto::get();
  check(crypto.copy(scratch.context, keyed_));
  for (const std::string_view part : parts) {
    check(crypto.update(scratch.context, reinterpret_cast<const unsigned char*>(part.data()), part.size()));
  }
  Digest digest;
  unsigned length = digest.size();
  check(crypto.final(scratch.context, digest.data(), &length));
  return digest;
}

GmacKey::Message::Message(const GmacKey& key, const Nonce& nonce) : context_(scratch_cipher()) {
  const Crypto& crypto = Crypto::get();
  check(crypto.encrypt_init(context_, crypto.aes_256_gcm(), nullptr, key.key_.data(), nonce.data()));
}

void GmacKey::Message::add(const void* data, std::size_t length) {
  constexpr std::size_t most = 1 << 30;  // libcrypto takes an int
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t part = 0; length > 0; at += part, length -= part) {
    part = std::min(length, most);
    int taken = 0;
    check(Crypto::get().encrypt_update(context_, nullptr, &taken, at, static_cast<int>(part)));
  }
}

Tag GmacKey::Message::tag() {
  constexpr int get_tag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
  const Crypto& crypto = Crypto::get();
  Tag tag;
  int length = 0;
  check(crypto.encrypt_final(context_, tag.data(), &length));
  check(crypto.control(context_, get_tag, static_cast<int>(tag.size()), tag.data()));
  return tag;
}

bool same(std::string_view a, std::string_view b) noexcept {
  if (b.size() != a.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); i++) difference |= static_cast<std::uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace rpc_ext
