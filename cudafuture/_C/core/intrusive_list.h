// A first-in-first-out list of objects that hold its links: it owns nothing and never allocates memory.
#pragma once

#include <cstddef>

namespace cudafuture {

// `Next`: the member that links an object to the one behind it.
template <class T, T* T::* Next = &T::next>
class IntrusiveList {
 public:
  bool empty() const noexcept { return head_ == nullptr; }
  T* head() const noexcept { return head_; }

  void push(T* one) noexcept {
    one->*Next = nullptr;
    (tail_ == nullptr ? head_ : tail_->*Next) = one;
    tail_ = one;
  }

  T* pop() noexcept {
    T* one = head_;
    if (one == nullptr) return nullptr;
    head_ = one->*Next;
    if (head_ == nullptr) tail_ = nullptr;
    one->*Next = nullptr;
    return one;
  }

  T* take_all() noexcept {
    T* list = head_;
    head_ = tail_ = nullptr;
    return list;
  }

  // Moves all objects that match the predicate into `taken`; returns the number that stay.
  template <class Predicate>
  std::size_t take_if(Predicate&& predicate, IntrusiveList& taken) {
    IntrusiveList stay;
    std::size_t count = 0;
    while (T* one = pop()) {
      if (predicate(*one)) {
        taken.push(one);
      } else {
        stay.push(one);
        ++count;
      }
    }
    *this = stay;
    return count;
  }

  // Removes and returns the first object that matches the predicate, or returns null.
  template <class Predicate>
  T* remove_if(Predicate&& predicate) {
    T* before = nullptr;
    for (T* one = head_; one != nullptr; before = one, one = one->*Next) {
      if (!predicate(*one)) continue;
      (before == nullptr ? head_ : before->*Next) = one->*Next;
      if (tail_ == one) tail_ = before;
      one->*Next = nullptr;
      return one;
    }
    return nullptr;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
};

}  // namespace cudafuture
