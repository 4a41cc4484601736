// A hash table of keys with one value each, optimised for batches of lookups.
//
// An index of thousands of keys does not stay in the processor's cache while tensors pass through it, so cache misses
// dominate a lookup. A slot holds the whole hash of its key and the address of the entry, and probing is linear. A
// lookup costs one miss for the slot and one for the entry, which stores its key after its value. A batch prefetches
// several keys ahead of their lookups (Batch).
//
// Entries do not move. They come from a pool: on the heap, between short-lived blocks, they would keep nearly empty
// pages alive. The table is not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory_resource>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "store/prefetch.h"

namespace cudafuture::store {

template <class Value>
class KeyTable {
 public:
  class Node {
   public:
    std::string_view key() const noexcept { return {reinterpret_cast<const char*>(this + 1), size_}; }
    Value value;

   private:
    friend class KeyTable;
    Node(std::uint64_t hash, std::size_t size) : hash_(hash), size_(size) {}

    std::uint64_t hash_;
    std::size_t size_;  // bytes of the key, which follow the entry
  };

  KeyTable() = default;
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;
  ~KeyTable() {
    for (const Slot& slot : slots_) destroy(slot.entry);
  }

  std::size_t size() const noexcept { return size_; }
  static std::uint64_t hash_of(std::string_view key) noexcept { return std::hash<std::string_view>()(key); }

  // Returns null if the key is missing. `hash` is the key's hash, from hash_of() or a Batch.
  Node* find(std::string_view key) const noexcept { return find(key, hash_of(key)); }
  Node* find(std::string_view key, std::uint64_t hash) const noexcept {
    if (slots_.empty()) return nullptr;
    for (std::size_t at = slot_of(hash); slots_[at].entry != nullptr; at = next(at)) {
      if (slots_[at].hash == hash && slots_[at].entry->key() == key) return slots_[at].entry;
    }
    return nullptr;
  }

  // Returns the entry of the key; adds one with a default value if it is missing.
  Node& find_or_add(std::string_view key) { return find_or_add(key, hash_of(key)); }
  Node& find_or_add(std::string_view key, std::uint64_t hash) {
    if (Node* const known = find(key, hash)) return *known;
    if ((size_ + 1) * 2 > slots_.size()) grow();
    void* const memory = pool_.allocate(sizeof(Node) + key.size(), alignof(Node));
    auto* const entry = new (memory) Node(hash, key.size());
    std::memcpy(static_cast<void*>(entry + 1), key.data(), key.size());
    insert({hash, entry});
    ++size_;
    return *entry;
  }

  void erase(Node* entry) noexcept {
    std::size_t hole = slot_of(entry->hash_);
    while (slots_[hole].entry != entry) hole = next(hole);
    // Move entries behind the hole into it if the hole would separate them from the slot where their probing begins.
    for (std::size_t at = next(hole); slots_[at].entry != nullptr; at = next(at)) {
      const std::size_t distance = (at - slot_of(slots_[at].hash)) & mask();
      if (distance >= ((at - hole) & mask())) slots_[std::exchange(hole, at)] = slots_[at];
    }
    slots_[hole] = {};
    --size_;
    destroy(entry);
  }

  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Slot& slot : slots_) {
      if (slot.entry != nullptr) visit(std::as_const(*slot.entry));
    }
  }

  // The hashes of the keys of a batch. It prefetches slots and entries several keys ahead of their lookups. `key_of(i)`
  // returns key `i`; `load(entry)` may prefetch the objects that an entry refers to.
  template <class KeyOf, class Load>
  class Batch {
   public:
    Batch(const KeyTable& table, std::size_t count, KeyOf key_of, Load load)
        : table_(table), count_(count), key_of_(std::move(key_of)), load_(std::move(load)) {
      for (std::size_t i = 0; i < kDepth; ++i) load_ahead(i);
    }
    // Called once per key, with `i` rising from 0, directly before its lookup.
    std::uint64_t hash(std::size_t i) {
      const std::uint64_t hash = hashes_[i % kDepth];
      load_ahead(i + kDepth);
      return hash;
    }

   private:
    // Three dependent loads: the slot, its entry, and the object that the entry refers to.
    static constexpr std::size_t kStage = 8;
    static constexpr std::size_t kDepth = 3 * kStage;

    void load_ahead(std::size_t i) {
      if (i < count_) {
        hashes_[i % kDepth] = hash_of(key_of_(i));
        table_.load_slot(hashes_[i % kDepth]);
      }
      if (i >= kStage && i - kStage < count_) {
        if (const Node* const entry = table_.first_with(hashes_[(i - kStage) % kDepth])) prefetch(entry, sizeof(Node));
      }
      if (i >= 2 * kStage && i - 2 * kStage < count_) {
        if (const Node* const entry = table_.first_with(hashes_[(i - 2 * kStage) % kDepth])) load_(*entry);
      }
    }

    const KeyTable& table_;
    const std::size_t count_;
    const KeyOf key_of_;
    const Load load_;
    std::uint64_t hashes_[kDepth] = {};
  };

 private:
  struct Slot {
    std::uint64_t hash = 0;
    Node* entry = nullptr;  // null: the slot is free
  };

  std::size_t mask() const noexcept { return slots_.size() - 1; }
  std::size_t slot_of(std::uint64_t hash) const noexcept { return hash & mask(); }
  std::size_t next(std::size_t slot) const noexcept { return (slot + 1) & mask(); }

  void load_slot(std::uint64_t hash) const noexcept {
    if (!slots_.empty()) __builtin_prefetch(&slots_[slot_of(hash)]);
  }

  // Returns the first entry with that hash, probably the key's; the entry itself is not accessed.
  const Node* first_with(std::uint64_t hash) const noexcept {
    if (slots_.empty()) return nullptr;
    for (std::size_t at = slot_of(hash); slots_[at].entry != nullptr; at = next(at)) {
      if (slots_[at].hash == hash) return slots_[at].entry;
    }
    return nullptr;
  }

  void insert(const Slot& slot) noexcept {
    std::size_t at = slot_of(slot.hash);
    while (slots_[at].entry != nullptr) at = next(at);
    slots_[at] = slot;
  }

  // Keeps at most half of the slots occupied.
  void grow() {
    std::vector<Slot> old(slots_.empty() ? 16 : slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.entry != nullptr) insert(slot);
    }
  }

  void destroy(Node* entry) noexcept {
    if (entry == nullptr) return;
    const std::size_t bytes = sizeof(Node) + entry->size_;
    entry->~Node();
    pool_.deallocate(entry, bytes, alignof(Node));
  }

  std::pmr::unsynchronized_pool_resource pool_;
  std::vector<Slot> slots_;  // empty, or a power of two
  std::size_t size_ = 0;
};

}  // namespace cudafuture::store
