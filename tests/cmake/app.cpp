#include "app.c" /* the same program as C++ */
