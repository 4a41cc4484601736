// A multipart write: separate calls write parts of a tensor, and commit() makes them visible atomically.
//
//     begin() ──► extent of the whole tensor ──► put() ──► engine ──► commit() ──► index
//                                                                └──► abort(): the extent is free
//
// Readers see the old tensor of the key until commit() has completed. The extent is freed after abort() or a failed
// commit(), once no part is in flight. A process that is killed before the commit leaves nothing: no journal names the
// extent.
//
// Lock: mutex_ guards the fields after it, and no other lock is taken under it. finish() needs no lock: nothing is in
// flight then, and put() and abort() do nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/checksum.h"
#include "io/engine.h"
#include "store/call.h"
#include "store/entry.h"
#include "store/slabs.h"
#include "store/write_batcher.h"

namespace cudafuture::store {

class Store;

class MultipartWrite final : public std::enable_shared_from_this<MultipartWrite> {
 public:
  // Allocates the extent. Throws Error if the store is closed, and Failure if it is read-only or has no room.
  static std::shared_ptr<MultipartWrite> begin(const std::shared_ptr<Store>& store, const std::string& key,
                                               const io::Shape& shape, std::uint64_t size);
  MultipartWrite(std::shared_ptr<Store> store, Write&& write, std::uint64_t size, Extent&& extent);
  ~MultipartWrite();
  MultipartWrite(const MultipartWrite&) = delete;
  MultipartWrite& operator=(const MultipartWrite&) = delete;

  // Returns true if bytes lie in the tensor, begin at a leaf, and end at one or with the tensor.
  bool has_part(std::uint64_t at, std::uint64_t size) const noexcept;
  // Return the reasons why bytes cannot be put: has_part() or put() has returned false.
  std::string not_a_part(const std::string& at, std::uint64_t size) const;
  static std::string put_before(std::uint64_t at, std::uint64_t size);

  // Writes a part, which consists of whole leaves. `digest`: the required checksum of its bytes. Returns false and does
  // nothing if some of the bytes belong to an earlier part. Throws Error after commit() or abort().
  bool put(std::uint64_t at, io::Memory&& memory, std::optional<std::uint64_t> digest, const CallPtr& call,
           io::Engine::Full when_full = io::Engine::Full::wait);
  // Installs the tensor when no part is in flight, or fails and aborts. Throws Error after commit() or abort().
  void commit(std::optional<std::uint64_t> digest, const CallPtr& call);
  void abort() noexcept;  // does nothing after commit() or abort()

  const std::string& key() const noexcept { return key_; }
  std::uint64_t size() const noexcept { return size_; }  // bytes
  io::Engine& engine() const noexcept;

 private:
  struct Part;
  enum class State : std::uint8_t { open, committing, aborted };

  void expect_open() const;
  bool claim(std::uint64_t at, std::uint64_t size);
  void submit(const std::shared_ptr<Part>& part, io::Memory&& memory, io::Engine::Full when_full);
  void ended(const Part& part, std::exception_ptr error) noexcept;
  bool leave(const std::exception_ptr& error, Extent& dropped) noexcept;
  void finish() noexcept;

  const std::shared_ptr<Store> store_;
  const std::string key_;
  const std::uint64_t size_;
  std::mutex mutex_;
  State state_ = State::open;
  Extent extent_;               // none: the tensor has no bytes, or the extent was dropped
  std::size_t in_flight_ = 0;   // parts, and the beginning of commit()
  std::uint64_t missing_;       // bytes that no part has claimed
  std::vector<bool> claimed_;   // by leaf
  io::Checksum checksum_;       // of the whole
  std::exception_ptr failure_;  // of the first part that failed
  Write write_;                 // for commit()
};

// The multipart writes of a store that have not been destroyed, for close().
//
// Lock: mutex_ guards all fields; no other lock is taken and no multipart write is dropped under it.
class OpenWrites {
 public:
  void add(const std::shared_ptr<MultipartWrite>& write);
  void remove(const MultipartWrite* write) noexcept;
  void abort_all() noexcept;

 private:
  std::mutex mutex_;
  std::unordered_map<const MultipartWrite*, std::weak_ptr<MultipartWrite>> writes_;
};

}  // namespace cudafuture::store
