// The journal of a durable store: a file to which batches of records are appended.
//
//     pages 0 and 1   a header in each; the newer one says how many bytes of the file a crash cannot have torn
//     then            batches, each with a header, a hash and its records
//
// A batch is written at once and synced before the next one, so a crash can tear only the last. With each batch a
// header is written that marks what precedes the batch as whole, and close() marks all of the file. What follows that
// mark and looks torn is dropped; anything else that is not valid is an error. So of a journal that was closed no
// damage is taken for a torn batch; of one that was not, only that to the last batch which leaves a sector with zeros,
// or cuts the file off. (Two headers, as LMDB has two meta pages: a crash can tear the one that is being written.)
//
// The journal and the file that will replace it have blocks beyond their ends, for the deletion of every key: a full
// disk refuses writes, but neither deletions nor a replacement.
//
// Used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/journal_content.h"
#include "storage/record.h"

namespace cudafuture::storage {

class Journal {
 public:
  using Show = ShowRecord;

  // Opens the journal of a folder to write, or makes it. Throws Failure; ChecksumError in Python if it is damaged.
  Journal(std::string folder, const Show& show);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  static bool exists(const std::string& folder);
  // Only reads. With Damage::skip it also shows the valid records of damaged batches. Throws Failure.
  static Findings read(const std::string& folder, Damage damage, const Show& show);

  const Findings& findings() const noexcept { return findings_; }  // of opening
  const std::string& torn_end() const noexcept { return torn_end_; }
  void drop_torn_end();  // before anything is appended; throws Failure

  // Gets blocks for these records, and for the deletion of every key. Throws Failure if the disk has none.
  void reserve(const std::vector<Record>& records);
  void reserve_if_possible() noexcept;
  // And syncs. Throws Failure; then nothing was appended, unless the journal is broken: the disk did not sync, or keeps
  // half of a batch. What is on it then is in doubt, and nothing more is appended.
  void append(const std::vector<Record>& records);
  void replace(const std::vector<Record>& records);  // by these alone, at once or not at all; throws Failure
  void close() noexcept;                             // marks all as whole, if the disk takes that; the last call

  bool is_broken() const noexcept { return is_broken_; }
  std::uint64_t size() const noexcept { return size_; }        // bytes
  std::uint64_t records() const noexcept { return records_; }  // in the file

 private:
  std::string path() const { return path_in(folder_); }
  std::string spare_path() const { return path() + ".new"; }
  static std::string path_in(const std::string& folder) { return folder + "/journal"; }
  static void write_header(int file, std::uint64_t generation, std::uint64_t whole, std::uint64_t snapshot,
                           const std::string& path);
  void recover(const Show& show);
  void close_files() noexcept;
  void count(const Record& record) noexcept;
  void open_spare();

  std::string folder_;
  Findings findings_;
  std::string torn_end_;
  int file_ = -1;
  int spare_ = -1;               // empty; replace() writes to it
  std::uint64_t size_ = 0;       // of the content
  std::uint64_t allocated_ = 0;  // of both files
  std::uint64_t deletions_ = 0;  // bytes that the deletion of every key takes at most
  std::uint64_t records_ = 0;
  std::uint64_t batches_ = 0;
  std::uint64_t generation_ = 0;  // of the newer header
  std::uint64_t snapshot_ = 0;
  bool is_broken_ = false;
};

}  // namespace cudafuture::storage
