#pragma once

namespace rpc_ext {

// Pointers to private members of torch's: an explicit instantiation may name them. The tag is of this namespace.
//
//     struct Size { friend auto member(Size); };
//     template struct Private<Size, &Box::size_>;
//     box.*member(Size{})
template <class Tag, auto pointer>
struct Private {
  friend auto member(Tag) { return pointer; }
};

}  // namespace rpc_ext
