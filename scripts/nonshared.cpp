// What GCC 12's headers want of libstdc++.so and GCC 8's (GLIBCXX_3.4.25, CXXABI_1.3.11) lacks, in
// terms of what that one has. Hidden: each shared library of a wheel links its own.
#include <exception>
#include <new>
#include <sstream>

#define FP8MOE_HIDDEN __attribute__((visibility("hidden")))

extern "C" {
void copy_exception(void* to,
                    const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void drop_exception(void* p) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

FP8MOE_HIDDEN void bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
FP8MOE_HIDDEN void add_reference(void* p) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
FP8MOE_HIDDEN void release(void* p) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void bad_length() { throw std::bad_array_new_length(); }
void add_reference(void* p) {
  void* copy;  // never dropped
  copy_exception(&copy, p);
}
void release(void* p) { drop_exception(p); }
}

template std::basic_ostringstream<char>::basic_ostringstream();
template std::string std::basic_stringbuf<char>::str() const&;
