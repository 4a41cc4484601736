#include "api/checksum.h"

#include "api/implementation.h"
#include "io/checksum.h"

namespace cudafuture::api {
namespace {

class DigestOfParts final : public Digest {
 public:
  explicit DigestOfParts(std::uint64_t nbytes) { checksum_.add(0, nbytes); }

  std::uint64_t add(std::uint64_t at, const void* data, std::size_t size) noexcept override {
    const iovec bytes = {const_cast<void*>(data), size};
    checksum_.take(at, &bytes, 1);
    return checksum_.digest_within(0, at, size);
  }

  std::uint64_t value(std::uint64_t seed) const noexcept override { return checksum_.digest(0, seed); }

 private:
  io::Checksum checksum_;
};

}  // namespace

void load_hash() {
  call_with_gil([] { bind::nb::module_::import_("cudafuture._xxhash").attr("install")(); });
}

std::uint64_t digest_of(const void* data, std::size_t size, std::uint64_t seed) {
  return io::digest_of(data, size, seed);
}

std::shared_ptr<Digest> make_digest(std::uint64_t nbytes) { return std::make_shared<DigestOfParts>(nbytes); }

}  // namespace cudafuture::api
