#include "app.c" /* compiles app.c as C++ */
