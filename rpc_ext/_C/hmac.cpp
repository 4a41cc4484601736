#include "hmac.h"

#include <dlfcn.h>

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

  Sha256 sha256;
  New make;
  Free free;
  Init init;
  Copy copy;
  Update update;
  Final final;

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
  }

  static void* open() {
    for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {  // the one that is loaded already, if any
      for (const char* const name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
        if (void* const library = ::dlopen(name, flags)) return library;
      }
    }
    throw std::runtime_error("no libcrypto was found, which computes the signatures of messages: install OpenSSL");
  }

  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("the libcrypto that was found has no ") + name);
  }
};

void check(int succeeded) {
  if (succeeded != 1) throw std::runtime_error("libcrypto could not compute an HMAC-SHA256");
}

void* make_context() {
  void* const context = Crypto::get().make();
  if (!context) throw std::bad_alloc();
  return context;
}

struct ScratchContext {
  void* const context = make_context();
  ~ScratchContext() { Crypto::get().free(context); }
};

}  // namespace

HmacKey::HmacKey(std::string_view key) : keyed_(make_context()) {
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

bool HmacKey::same(const Digest& a, std::string_view b) noexcept {
  if (b.size() != a.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); i++) difference |= a[i] ^ static_cast<std::uint8_t>(b[i]);
  return difference == 0;
}

}  // namespace rpc_ext
