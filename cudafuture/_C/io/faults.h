// A backend that injects faults by a seeded schedule, so that tests see failures that are rare on real disks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "io/backend.h"

namespace cudafuture::io {

// The rate of each fault, as a fraction of all results: 0 never, 1 always.
struct FaultRates {
  std::uint64_t seed = 0;
  double io_error = 0;                             // EIO, and no byte was transferred
  double no_space = 0;                             // ENOSPC, of writes
  double again = 0;                                // EAGAIN
  double interrupted = 0;                          // EINTR
  double cut_short = 0;                            // fewer bytes were transferred than requested
  double late = 0;                                 // the result arrives after later ones
  bool held = false;                               // no result arrives before release_held()
  std::unordered_map<std::uint64_t, int> at = {};  // errnos of specific results, by their number from 1 on
};

class Faults final : public Backend {
 public:
  Faults(std::unique_ptr<Backend> real, const FaultRates& rates);

  void put(Block& block) noexcept override;
  void begin() noexcept override { real_->begin(); }
  void wait(bool may_block, std::vector<Block*>& ended) noexcept override;
  void wake() noexcept override { real_->wake(); }
  void use_buffers(std::byte* buffers, std::size_t bytes) noexcept override { real_->use_buffers(buffers, bytes); }
  const char* name() const noexcept override { return real_->name(); }

  void release_held() noexcept;  // any thread may call it

 private:
  struct Held {
    Block* block;
    unsigned rounds;  // of wait()
  };

  bool happens(double rate) noexcept { return rate > 0 && std::uniform_real_distribution<>()(random_) < rate; }
  bool make_up(Block& block) noexcept;

  std::unique_ptr<Backend> real_;
  FaultRates rates_;
  std::mt19937_64 random_;
  std::uint64_t asked_ = 0;  // blocks
  std::atomic<bool> is_held_;
  std::vector<Block*> made_up_;
  std::vector<Held> held_;
};

}  // namespace cudafuture::io
