// The list of what a durable store has: a file to which batches of records are appended.
//
// A batch is written at once and synced before the next one: so only the last can be torn by a crash, and then none of
// its records has been promised to anybody. It is dropped. Damage before other batches is an error instead, and so is
// damage in what a journal was made with: that has its name only since it was synced.
//
// Used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/entry.h"

namespace cudafuture::storage {

struct Record {
  std::string key;
  std::uint64_t turn = 0;
  bool is_deletion = false;
  // ---- otherwise
  Shape shape;
  std::uint64_t size = 0;
  std::uint64_t slab = 0;
  std::uint64_t offset = 0;
  std::uint64_t digest = 0;
  bool has_digest = false;
};
Record record_of(const std::string& key, const Entry& entry);
Record deletion_of(const std::string& key, std::uint64_t turn);

class Journal {
 public:
  // Opens or makes the journal of a folder, and shows what is in it, in order. Throws Failure; ChecksumError in Python
  // where it is damaged.
  Journal(std::string folder, const std::function<void(Record&&)>& show);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // And syncs. Throws Failure; then nothing was appended, unless the journal is broken: the disk did not sync, or keeps
  // half of a batch. What is on it then is in doubt, and nothing more is appended.
  void append(const std::vector<Record>& records);
  bool is_broken() const noexcept { return is_broken_; }
  void replace(const std::vector<Record>& records);      // by these alone, at once or not at all; throws Failure
  std::uint64_t size() const noexcept { return size_; }  // bytes
  static bool exists(const std::string& folder);

 private:
  std::string path() const { return path_in(folder_); }
  static std::string path_in(const std::string& folder) { return folder + "/journal"; }
  static std::string batch(const std::vector<Record>& records, std::uint64_t number);
  void replay(std::string_view content, const std::function<void(Record&&)>& show);

  std::string folder_;
  int file_ = -1;
  std::uint64_t size_ = 0;
  std::uint64_t batches_ = 0;
  bool is_broken_ = false;
};

}  // namespace cudafuture::storage
