#include "io/ring.h"

#ifdef CUDAFUTURE_LIBURING

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>

namespace cudafuture::io {
namespace {

constexpr std::array<unsigned, 3> kSetups = {
#if defined(IORING_SETUP_DEFER_TASKRUN) && defined(IORING_SETUP_SINGLE_ISSUER)
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,  // since Linux 6.1
#else
    0,
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
    IORING_SETUP_COOP_TASKRUN,  // since Linux 5.19
#else
    0,
#endif
    0,
};

// Orders a ring after rings that have ended. A ring may get the memory of an ended one. The kernel makes that safe, but
// liburing maps the memory without libc, so ThreadSanitizer does not see it.
std::atomic<unsigned> rings_made_and_ended{0};

class Ring final : public Backend {
 public:
  ~Ring() override {
    rings_made_and_ended.fetch_add(1, std::memory_order_acq_rel);
    if (is_set_up_) io_uring_queue_exit(&ring_);
    if (event_ >= 0) ::close(event_);
  }

  // Returns an errno, or 0.
  int set_up(std::size_t depth) noexcept {
    event_ = ::eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return errno;
    int code = -EINVAL;
    for (const unsigned flags : kSetups) {
      io_uring_params params = {};
      params.flags = flags | IORING_SETUP_CLAMP;
      code = io_uring_queue_init_params(static_cast<unsigned>(depth) + 1, &ring_, &params);
      if (code != -EINVAL) break;
    }
    if (code != 0) return -code;
    rings_made_and_ended.fetch_add(1, std::memory_order_acq_rel);
    is_set_up_ = true;
    if (!can_read()) return ENOSYS;
    listen();
    return io_uring_submit(&ring_) < 0 ? EINVAL : 0;
  }

  void put(Block& block) noexcept override {
    if (block.is_staged) register_buffers();
    io_uring_sqe* const entry = next_entry();
    const iovec* const pieces = block.pieces.data() + block.first;
    const auto count = static_cast<unsigned>(block.count);
    const bool reads = block.direction == Direction::read;
    if (count == 1) {
      const auto size = static_cast<unsigned>(pieces->iov_len);
      const bool is_fixed = block.is_staged && are_registered_;
      if (is_fixed && reads) {
        io_uring_prep_read_fixed(entry, block.descriptor, pieces->iov_base, size, block.offset, 0);
      } else if (is_fixed) {
        io_uring_prep_write_fixed(entry, block.descriptor, pieces->iov_base, size, block.offset, 0);
      } else if (reads) {
        io_uring_prep_read(entry, block.descriptor, pieces->iov_base, size, block.offset);
      } else {
        io_uring_prep_write(entry, block.descriptor, pieces->iov_base, size, block.offset);
      }
    } else if (reads) {
      io_uring_prep_readv(entry, block.descriptor, pieces, count, block.offset);
    } else {
      io_uring_prep_writev(entry, block.descriptor, pieces, count, block.offset);
    }
    io_uring_sqe_set_data(entry, &block);
  }

  void begin() noexcept override {
    if (io_uring_sq_ready(&ring_) != 0) io_uring_submit(&ring_);
  }

  void wait(bool may_block, std::vector<Block*>& ended) noexcept override {
    // EINTR, EAGAIN, EBUSY: the caller calls again.
    if (may_block) {
      io_uring_submit_and_wait(&ring_, 1);
    } else {
      io_uring_submit_and_get_events(&ring_);
    }
    io_uring_cqe* entry;
    while (io_uring_peek_cqe(&ring_, &entry) == 0) {
      auto* const block = static_cast<Block*>(io_uring_cqe_get_data(entry));
      const int result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      if (block == nullptr) {
        listen();
      } else {
        block->result = result;
        ended.push_back(block);
      }
    }
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    while (::write(event_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void use_buffers(std::byte* buffers, std::size_t bytes) noexcept override {
    if (are_registered_) io_uring_unregister_buffers(&ring_);
    are_registered_ = has_tried_ = false;
    buffers_ = buffers;
    bytes_ = bytes;
  }

  const char* name() const noexcept override { return "io_uring"; }

 private:
  bool can_read() noexcept {  // since Linux 5.6
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    const bool can = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
    io_uring_free_probe(probe);
    return can;
  }

  void listen() noexcept {
    io_uring_sqe* const entry = next_entry();
    io_uring_prep_read(entry, event_, &events_, sizeof events_, 0);
    io_uring_sqe_set_data(entry, nullptr);
  }

  io_uring_sqe* next_entry() noexcept {
    io_uring_sqe* entry;
    while ((entry = io_uring_get_sqe(&ring_)) == nullptr) io_uring_submit(&ring_);
    return entry;
  }

  void register_buffers() noexcept {
    if (has_tried_) return;
    has_tried_ = true;
    const iovec all = {buffers_, bytes_};
    are_registered_ = io_uring_register_buffers(&ring_, &all, 1) == 0;
  }

  io_uring ring_ = {};
  bool is_set_up_ = false;
  int event_ = -1;
  std::uint64_t events_ = 0;
  std::byte* buffers_ = nullptr;
  std::size_t bytes_ = 0;
  bool has_tried_ = false;
  bool are_registered_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_ring(std::size_t depth, std::string& why_not) {
  auto ring = std::make_unique<Ring>();
  const int code = ring->set_up(depth);
  if (code == 0) return ring;
  why_not = "io_uring: " + std::generic_category().message(code);
  if (code == ENOSYS) why_not += " (the kernel has none, or a sandbox hides it)";
  if (code == EPERM) why_not += " (forbidden by a sandbox, or by the sysctl kernel.io_uring_disabled)";
  if (code == ENOMEM) why_not += " (RLIMIT_MEMLOCK may be too small)";
  return nullptr;
}

}  // namespace cudafuture::io

#else

namespace cudafuture::io {

std::unique_ptr<Backend> make_ring(std::size_t, std::string& why_not) {
  why_not = "io_uring: the library was built without liburing";
  return nullptr;
}

}  // namespace cudafuture::io

#endif
