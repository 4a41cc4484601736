// The journal of a durable store: an append-only file of batches of records.
//
//     pages 0 and 1   a header in each; the newer one says how many bytes of the file a crash cannot have torn
//     then            batches, each with a header, a hash and its records
//
// A batch is written in one call and synced before the next one, so a crash can tear only the last batch. Each batch
// also writes a header that marks everything before the batch as whole; close() marks the whole file.
//
// A torn batch after that mark is dropped; any other invalid data is an error. In a journal that was closed, damage is
// therefore never mistaken for a torn batch. In one that was not closed, only damage to the last batch can be, and only
// if it leaves a sector of zeros or cuts the file off. (There are two headers, like LMDB's two meta pages, because a
// crash can tear the one being written.)
//
// The journal and the file that will replace it have blocks allocated beyond their ends, for the deletion of every key.
// So a full disk refuses writes, but neither deletions nor a replacement.
//
// Used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/journal_content.h"
#include "store/record.h"

namespace cudafuture::store {

class Journal {
 public:
  using Show = ShowRecord;

  // Opens or creates the journal of a folder for writing. Throws Failure; ChecksumError in Python if it is damaged.
  Journal(std::string folder, const Show& show);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  static bool exists(const std::string& folder);
  // Only reads. With Damage::skip it also passes the valid records of damaged batches to `show`. Throws Failure.
  static JournalFindings read(const std::string& folder, Damage damage, const Show& show);

  const JournalFindings& findings() const noexcept { return findings_; }  // of opening
  const std::string& torn_end() const noexcept { return torn_end_; }
  void drop_torn_end();  // before the first append; throws Failure

  // Allocates blocks for these records, and for the deletion of every key. Throws Failure if the disk is full.
  void reserve(const std::vector<Record>& records);
  void reserve_if_possible() noexcept;
  // Appends and syncs. Throws Failure. After a failure nothing was appended, unless the journal is broken: the sync
  // failed, or the file keeps half a batch. A broken journal's end is in doubt, and it takes no more records.
  void append(const std::vector<Record>& records);
  void replace(const std::vector<Record>& records);  // replaces all records with these, atomically; throws Failure
  void close() noexcept;                             // marks everything as whole, if possible; the last call

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
  JournalFindings findings_;
  std::string torn_end_;
  int file_ = -1;
  int spare_ = -1;               // empty; replace() writes to it
  std::uint64_t size_ = 0;       // of the content
  std::uint64_t allocated_ = 0;  // of both files
  std::uint64_t deletions_ = 0;  // maximum bytes for deleting every key
  std::uint64_t records_ = 0;
  std::uint64_t batches_ = 0;
  std::uint64_t generation_ = 0;  // of the newer header
  std::uint64_t snapshot_ = 0;
  bool is_broken_ = false;
};

}  // namespace cudafuture::store
